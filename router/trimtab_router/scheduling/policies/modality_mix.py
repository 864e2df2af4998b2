"""All that waits is planned together, and what the plan gives the most urgent leaves. Pure.

Jobs stand in the order of their deadlines, each with its exact splits over points and batches (`book`); the schedule
chooses among them so that as many answers as can be are in time, and then as many as can be are right. So accuracy
rises by itself when little waits, and a job is given up only if even the fastest splits cannot make all of them: the
least worthy one, which still stays in the queue until its time has come. Small jobs go together: the most urgent ones
as a batch of the size that pays, those behind them as full ones.

On several replicas each job is planned on the one that would end it first; the one that is free now gets what is its
own. A price of time holds back for those who are yet to come. A second look at the least certain rows is a way like
any other; who waits for one has an answer already, and gives way to all who have none.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import (
    DROPPED,
    Job,
    JointOption,
    ProgramStep,
    assign_to_servers,
    pressure,
    solve,
)
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil, least_seconds
from trimtab_router.scheduling.policies.job_groups import (
    SMALL_SHARE,
    JobGroup,
    JobOptions,
    dispatch_first_batch,
    group_jobs,
    job_options,
    shares_batch,
)
from trimtab_router.scheduling.policies.option_cache import OptionCache, precompute_tables
from trimtab_router.scheduling.policies.split_table import ServingOption
from trimtab_router.scheduling.stage_request import RowSlice, Signature

MOST_UNITS = 20
"""How far it plans: batches, or large jobs."""
COMPANY = 0.5
"""Of the seconds of the slowest full batch: what second looks keep for a batch of their own while they wait for others
to fill it."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A unit, what it may choose among, and the first few units as one with what these may choose among."""

    unit: JobGroup
    offers: JobOptions
    together: tuple[tuple[int, JobGroup, JobOptions], ...] = ()

    def job(self, *, last: bool) -> Job:
        """As the schedule knows it; `last`: nobody stands behind it."""
        groups = () if last else self.together
        return Job(
            self.unit.deadline,
            self.offers.seconds,
            self.offers.values,
            self.unit.worth,
            [JointOption(count, found.seconds, found.values, found.least) for count, _, found in groups],
            self.offers.least,
        )

    def chosen(self, step: ProgramStep) -> tuple[JobGroup, JobOptions]:
        """Whom a step serves, and of what."""
        for count, unit, found in self.together:
            if count == step.jobs:
                return unit, found
        return self.unit, self.offers


def decide(view: SchedulerView, *, splits: bool = True) -> Dispatch | WaitUntil:
    """Let the next batch leave.

    Args:
        view: what waits.
        splits: whether the rows of one job may go in several ways; else each job goes in one.
    """
    start = max(view.now, min(view.free_at(), default=view.now))
    menu = OptionCache(view)
    view = menu.view
    planned, hopeless = _planned(menu, start, splits=splits)
    planned = _own(view, planned)
    if not planned:
        return WaitUntil(view.now, hopeless) if hopeless else slack_fit.decide(view)
    planned[0] = _grouped(menu, planned)
    jobs = [each.job(last=len(planned) == 1) for each in planned]
    head = planned[0].unit.head.work
    given = head.deadline - head.enqueued_at - view.later_seconds
    least = sum(float(each.offers.seconds[0]) for each in planned)
    found = solve(jobs, start, price=view.price * pressure(least, given))
    steps = [step for step in found.steps if step.option != DROPPED]
    if not steps or (view.drop_policy != "Predicted" and found.steps[0].option == DROPPED):
        return slack_fit.decide(view)
    ordered, spare_seconds = _in_order(view, planned, steps, start)
    unit, choice = planned[ordered[0].place].chosen(ordered[0])
    line, rows = choice.lines(ordered[0].option)[0]
    mates = _mates(menu, unit, line, [(planned[each.place], each) for each in ordered[1:]])
    leaving = dispatch_first_batch(menu, unit, line, rows, mates, spare_seconds)
    return replace(leaving, drops=hopeless)


def _in_order(
    view: SchedulerView, planned: list[_Planned], steps: list[ProgramStep], start: float
) -> tuple[list[ProgramStep], float]:
    """Who is served when, and how much later than planned all could be; negative where anybody would be late.

    By deadline, but second looks wait for company: those in front let the first who has no answer go before them while
    that makes none of them late, in whatever batch they then leave.
    """
    ahead = next((place for place, step in enumerate(steps) if not planned[step.place].unit.known), 0)
    if ahead:
        looks, rest = [steps[ahead], *steps[:ahead]], steps[ahead + 1 :]
        end, spare = _spare_seconds(planned, looks, start)
        spare -= COMPANY * max(point.seconds(view.most_rows) for point in view.points)
        if spare >= 0:
            return [*looks, *rest], min(spare, _spare_seconds(planned, rest, end)[1])
    return steps, _spare_seconds(planned, steps, start)[1]


def _planned(menu: OptionCache, start: float, *, splits: bool) -> tuple[list[_Planned], list[RowSlice]]:
    """The first units of the queue that can be served, and who can not even by the fastest ways to their floors."""
    view = menu.view
    quarter = max(view.most_rows // SMALL_SHARE, 1)
    sizes = (1, quarter, quarter, 2 * quarter, view.most_rows)
    found: list[_Planned] = []
    hopeless: list[RowSlice] = []
    for unit in group_jobs(menu, 2 * MOST_UNITS, sizes):
        choice = job_options(menu, unit, mixed=splits and len(unit.slices) == 1)
        if choice is None:
            continue
        if view.drop_policy == "Predicted" and start + choice.seconds[0] > unit.deadline and len(unit.slices) == 1:
            hopeless += unit.slices
        elif len(found) < MOST_UNITS:
            found.append(_Planned(unit, choice))
    gone = set(map(id, hopeless))  # a large job has several units
    return [each for each in found if id(each.unit.head) not in gone], list({id(p): p for p in hopeless}.values())


def _own(view: SchedulerView, planned: list[_Planned]) -> list[_Planned]:
    """Those that the replica which is free now would end first."""
    free_at = view.free_at()
    if len(free_at) < 2 or not planned:
        return planned
    shares = assign_to_servers([each.job(last=True) for each in planned], free_at)
    return [planned[place] for place in shares[0]]


def _grouped(menu: OptionCache, planned: list[_Planned]) -> _Planned:
    """The most urgent, which may also leave as one batch with those behind it, as far as they are of its kind."""
    view, first, groups = menu.view, planned[0], []
    together = JobGroup([], 0, inf)
    for count, each in enumerate(planned, 1):
        if not _goes_with(first.unit, each.unit, view) or together.rows + each.unit.rows > view.most_rows:
            break
        for piece in each.unit.slices:
            together.add(piece, piece.rows, each.unit.deadline)
        if count > 1:
            whole = JobGroup([*together.slices], together.rows, together.deadline)
            whole.floor, whole.weight, whole.known = together.floor, together.weight, together.known
            choice = job_options(menu, whole, mixed=False)
            if choice is not None:
                groups.append((count, whole, _unhurried(view, whole, choice)))
    return _Planned(first.unit, first.offers, tuple(groups))


def _goes_with(one: JobGroup, other: JobGroup, view: SchedulerView) -> bool:
    piece, head = other.head, one.head
    small = SMALL_SHARE * piece.rows <= view.most_rows and not piece.alone and not head.alone
    alike = _shapes_agree(piece.work.signature, head.work.signature) and piece.work.wish.task == head.work.wish.task
    return small and alike and (piece.again is None) == (head.again is None)


def _shapes_agree(one: Signature, other: Signature) -> bool:
    """Whether what both have is of the same shape, so that a point which reads no more can serve them together."""
    if one == other:
        return True
    shapes = dict(one)
    return all(shapes.get(name, shape) == shape for name, shape in other) and bool(shapes.keys() & dict(other).keys())


def _unhurried(view: SchedulerView, unit: JobGroup, found: JobOptions) -> JobOptions:
    """Less what would make newcomers late who have as much time as the most urgent had, and then wait for a batch."""
    work = unit.head.work
    most = work.deadline - work.enqueued_at - view.later_seconds - least_seconds(view.points, view.most_rows)
    places = np.flatnonzero(found.seconds <= most)
    if not places.size or view.drop_policy == "Never":
        places = np.arange(1)
    least = found.least if places.size and places[0] == 0 else 1.0
    return JobOptions(found.book, found.page, found.places[places], found.seconds[places], found.values[places], least)


def _mates(
    menu: OptionCache, unit: JobGroup, line: ServingOption, behind: list[tuple[_Planned, ProgramStep]]
) -> list[RowSlice]:
    """Rows behind a unit that are planned to go as it goes, and may go with it."""
    point = menu.fare(unit.slices).points[line.point]
    found: list[RowSlice] = []
    for planned, step in behind:
        other, choice = planned.chosen(step)
        rows = sum(
            count
            for own, count in choice.lines(step.option)
            if own.look == line.look and choice.book.costs[own.point].name == point.name
        )
        for piece in other.slices:
            if rows > 0 and piece not in unit.slices and shares_batch(point, unit.head, piece):
                found.append(piece if piece.rows <= rows else piece.first(rows))
            rows -= piece.rows
    return found


def _spare_seconds(planned: list[_Planned], steps: list[ProgramStep], start: float) -> tuple[float, float]:
    """When all these are served, one after the other, and how much later they could be."""
    end, spare = start, inf
    for step in steps:
        unit, choice = planned[step.place].chosen(step)
        end += float(choice.seconds[step.option])
        spare = min(spare, unit.deadline - end)
    return end, spare


POLICY = Policy(decide, falls_back=True, mixes=True, prepare=precompute_tables)
