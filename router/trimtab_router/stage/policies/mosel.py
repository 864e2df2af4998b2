"""MOSEL as printed (4.3 and 5.2): one subset a job, jobs one by one, and the time budget of the violator. Pure.

A baseline, with what is known to be wrong with it. Each job begins at its most accurate strategy. Along the queue,
whoever would be late is a violator: for all up to it strategies are chosen anew, so that accuracy times rows is
greatest and all of them together end by the violator's deadline. Those before it have deadlines of their own, which
nobody looks at again. Where nothing makes it, the violator is passed over, until its time has come.
"""

from trimtab_router.stage.policies import slack_fit
from trimtab_router.stage.policies.menu import Menu
from trimtab_router.stage.policies.modality_mix import MOST_UNITS
from trimtab_router.stage.policies.schedule import DROPPED, Job, solve
from trimtab_router.stage.policies.units import Offers, Unit, departure, offers, units
from trimtab_router.stage.policies.view import Departure, NotBefore, Policy, View

CELLS = 256


class Kept:
    """A job that is not dropped, and its strategy: at first the most accurate."""

    def __init__(self, unit: Unit, choice: Offers) -> None:
        self.unit = unit
        self.choice = choice
        self.option = choice.seconds.size - 1

    @property
    def seconds(self) -> float:
        """Of all its batches."""
        return float(self.choice.seconds[self.option])


def decide(view: View) -> Departure | NotBefore:
    """Let the first batch of the most urgent job leave."""
    start = max(view.now, min(view.free_at(), default=view.now))
    kept: list[Kept] = []
    for job in jobs_of(view):
        kept.append(job)
        if start + sum(each.seconds for each in kept) > job.unit.deadline and not _replanned(kept, start):
            kept.pop()
    return leave(view, kept)


def jobs_of(view: View) -> list[Kept]:
    """The first jobs, each with its strategies: all its rows at one point."""
    menu = Menu(view)
    found = ((unit, offers(menu, unit, mixed=False, looks=False)) for unit in units(menu, MOST_UNITS))
    return [Kept(unit, choice) for unit, choice in found if choice is not None]


def leave(view: View, kept: list[Kept]) -> Departure | NotBefore:
    """Let the first batch of the first job leave, with rows of no other."""
    if not kept:
        return slack_fit.decide(view)
    line, rows = kept[0].choice.lines(kept[0].option)[0]
    return departure(Menu(view), kept[0].unit, line, rows)


def _replanned(kept: list[Kept], start: float) -> bool:
    """Choose strategies for all of them that end together by the deadline of the last; False where none do."""
    until = kept[-1].unit.deadline
    jobs = [Job(until, each.choice.seconds, each.choice.values, worth=1.0) for each in kept]
    steps = solve(jobs, start, cells=CELLS).steps
    if any(step.option == DROPPED for step in steps):
        return False
    for each, step in zip(kept, steps, strict=True):
        each.option = step.option
    return True


POLICY = Policy(decide, falls_back=True)
