"""All that waits is planned as batches, each with its operating point, by utility times accuracy. Pure.

Made for models whose points keep more or fewer tokens: one loaded model, any point for any batch, tasks mixed. Batches
stand in the order of their deadlines; the shared schedule chooses for each a point, a second look, or to be given up,
so that the expected utility of what is in time is greatest. Who is given up stays in the queue until its time has come.

A batch takes a better point only where that pays more than the time is worth to all others. What time is worth follows
from what waits and how fast more comes (`shadow_price`): so few waiting rows under a high load do not get a slow point
that the rows behind them pay for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import (
    DROPPED,
    Job,
    JointOption,
    ProgramStep,
    Schedule,
    assign_to_servers,
    solve,
)
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import first_rows, remaining_capacity, shares_batch
from trimtab_router.scheduling.policies.shadow_price import shadow_price
from trimtab_router.scheduling.policies.token_batches import CandidateBatch, batches_of
from trimtab_router.scheduling.policies.token_options import TokenOption, TokenOptions, increasing_value
from trimtab_router.scheduling.stage_request import RowSlice

MOST_BATCHES = 40
"""How far it plans."""
_LEADERS, _MOST_JOINED = 3, 5
"""How many of the first batches may be joined by those behind, and by how many."""
_THRIFT = 1e-3
"""Of what a second brings on average: among plans worth the same the one that takes less time is better."""


@dataclass(slots=True, eq=False)
class Planned:
    """A batch, or several as one, and what it may choose among, from the fastest on.

    `of` counts the batches; `groups` are those that begin with the same one.
    """

    batch: CandidateBatch
    of: int
    choices: Integers
    seconds: Floats
    values: Floats
    groups: list["Planned"] = field(default_factory=list)

    def job(self, thrift: float) -> Job:
        """As the schedule knows it."""
        together = [JointOption(g.of, g.seconds, g.values - thrift * g.seconds) for g in self.groups]
        return Job(self.batch.deadline, self.seconds, self.values - thrift * self.seconds, together=together)

    def chosen(self, step: ProgramStep) -> "Planned":
        """Whom a step serves."""
        return self if step.jobs == 1 else next(group for group in self.groups if group.of == step.jobs)


def decide(view: SchedulerView, *, priced: bool = True, joins: bool = True) -> Dispatch | WaitUntil:
    """Let the next batch leave.

    Args:
        view: what waits.
        priced: whether time costs what it is worth to others.
        joins: whether the size of a batch is chosen with its point; else batches are as large as can be.
    """
    if view.drop_policy == "Never":
        return slack_fit.decide(view)
    start = max(view.now, min(view.free_at(), default=view.now))
    menu = TokenOptions(view)
    planned = plan_of(view, menu, priced=priced, joins=joins)
    if not planned:
        return slack_fit.decide(view)
    seconds = sum(float(each.seconds[0]) for each in planned)
    thrift = _THRIFT * sum(float(each.values[-1]) for each in planned) / max(seconds, 1e-9)
    found = solve([each.job(thrift) for each in planned], start)
    step = next((step for step in found.steps if step.option != DROPPED), None)
    if step is None or (view.drop_policy == "Expired" and found.steps[0].option == DROPPED):
        return slack_fit.decide(view)
    return _departure(view, menu, planned, found, step, start)


def plan_of(view: SchedulerView, menu: TokenOptions, *, priced: bool = True, joins: bool = True) -> list[Planned]:
    """The first batches that the free replica should serve, and what each may choose among."""
    batches = batches_of(view, MOST_BATCHES, small=joins)
    price = shadow_price(view, batches, menu) if priced else 0.0
    singles = [each for each in _priced(menu, [(batch, 1) for batch in batches], price) if each.choices.size]
    free_at = view.free_at()
    if len(free_at) > 1:
        (own, *_) = assign_to_servers([each.job(0.0) for each in singles], free_at)
        singles = [singles[place] for place in own]
    groups = [
        (place, *group) for place in range(_LEADERS * joins) for group in _groups(singles[place:], view.most_rows)
    ]
    for (place, *_), group in zip(groups, _priced(menu, [(b, n) for _, b, n in groups], price), strict=True):
        if group.choices.size:
            singles[place].groups.append(group)
    return singles


def _groups(planned: list[Planned], most_rows: int) -> list[tuple[CandidateBatch, int]]:
    """The first as one with those right behind it."""
    found: list[tuple[CandidateBatch, int]] = []
    whole = planned[0].batch if planned else None
    for count, each in enumerate(planned[1 : _MOST_JOINED + 1], 2):
        if whole is None or not whole.goes_with(each.batch, most_rows):
            break
        whole = whole.joined(each.batch)
        found.append((whole, count))
    return found


def _priced(menu: TokenOptions, batches: list[tuple[CandidateBatch, int]], price: float) -> list[Planned]:
    """What each may choose among: what it is worth, less what more time than the least is worth to others."""
    if not batches:
        return []
    seconds = menu.seconds(np.array([batch.rows for batch, _ in batches]))
    values = menu.values([batch.weights for batch, _ in batches])
    for place, (batch, _) in enumerate(batches):
        if batch.company[1] or batch.known:
            values[place] = _narrowed(menu, batch, values[place])
    allowed = np.where(values > -inf, seconds, inf)
    values = values - price * (seconds - allowed.min(axis=1, initial=1e9)[:, None])
    _, places = increasing_value(seconds, values)
    return [
        Planned(batch, count, chosen, seconds[row, chosen], values[row, chosen])
        for row, ((batch, count), chosen) in enumerate(zip(batches, places, strict=True))
    ]


def _narrowed(menu: TokenOptions, batch: CandidateBatch, values: Floats) -> Floats:
    """Without what does not reach the floor; of rows that have an answer, what a better one adds."""
    piece = batch.slices[0]
    fit = np.array([choice.point.suits(piece) and _reaches(choice, piece) for choice in menu.choices])
    if piece.provisional is None:
        return np.where(fit, values, -inf)
    fit &= np.array([choice.look is None for choice in menu.choices])
    if piece.again is not None and piece.again.accuracy is not None:
        meant = np.array([choice.point.name == piece.again.point for choice in menu.choices])
        values = np.where(meant, sum(batch.weights.values()) * piece.again.accuracy, values)
    return np.where(fit, values - batch.known, -inf)


def _reaches(choice: TokenOption, piece: RowSlice) -> bool:
    """Whether the mean of both looks keeps the floor as well."""
    return choice.look is None or choice.accuracy_for(piece.work.wish.task) >= piece.work.accuracy_floor


def _departure(
    view: SchedulerView, menu: TokenOptions, planned: list[Planned], found: Schedule, step: ProgramStep, start: float
) -> Dispatch:
    """Let a batch leave, filled with others that are planned to go as it goes, as far as nobody is late for it."""
    leaving = planned[step.place].chosen(step)
    choice, rows = menu.choices[leaving.choices[step.option]], leaving.batch.rows
    takes = first_rows(leaving.batch.slices, rows)
    if choice.look is not None:
        return Dispatch(choice.point, takes, again=choice.look.again)
    behind = found.steps[found.steps.index(step) :]
    spare = _spare_seconds(planned, behind, start)
    if spare > 0 and not takes[0].alone and rows < view.most_rows:
        mates = _mates(menu, leaving, choice, [(planned[each.place].chosen(each), each) for each in behind[1:]])
        takes += first_rows(mates, remaining_capacity(view, choice.point, rows, spare))
    return Dispatch(choice.point, takes)


def _mates(
    menu: TokenOptions, leaving: Planned, choice: TokenOption, behind: list[tuple[Planned, ProgramStep]]
) -> Iterator[RowSlice]:
    taken = {id(piece.work) for piece in leaving.batch.slices}
    return (
        piece
        for planned, step in behind
        if step.option != DROPPED and menu.choices[planned.choices[step.option]] is choice
        if planned.batch.company[1:] == leaving.batch.company[1:]
        for piece in planned.batch.slices
        if id(piece.work) not in taken and shares_batch(choice.point, leaving.batch.slices[0], piece)
    )


def _spare_seconds(planned: list[Planned], steps: Sequence[ProgramStep], start: float) -> float:
    """How much later than planned all could be served; negative where anybody would be late."""
    end, spare = start, inf
    for step in steps:
        if step.option != DROPPED:
            each = planned[step.place].chosen(step)
            end += float(each.seconds[step.option])
            spare = min(spare, each.batch.deadline - end)
    return spare


POLICY = Policy(decide, falls_back=True)
