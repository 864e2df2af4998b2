"""MOSEL's random heuristic (appendix A): jobs before a violator take their fastest strategies in random order. Pure.

A baseline. The paper draws with replacement, and never ends where nothing makes the violator: here the jobs are
shuffled once, and the violator is passed over if it is late after all of them. The shuffle is a hash of the
moment, so that the same view has the same answer.
"""

from zlib import crc32

from benchmarks.papers.policies.mosel import Kept, jobs_of, leave
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the first batch of the most urgent job leave."""
    start = max(view.now, min(view.free_at(), default=view.now))
    kept: list[Kept] = []
    for job in jobs_of(view):
        kept.append(job)
        if not _made(kept, start, view.now):
            kept.pop()
    return leave(view, kept)


def _made(kept: list[Kept], start: float, now: float) -> bool:
    """Make jobs faster, one after the other, until the last is in time; False where it never is."""
    until = kept[-1].unit.deadline
    spent = start + sum(each.seconds for each in kept)
    places = range(len(kept))
    for place in sorted(places, key=lambda place: crc32(f"{now!r} {place}".encode())):
        each = kept[place]
        if spent <= until:
            break
        spent -= each.seconds - float(each.choice.seconds[0])
        each.option = 0
    return spent <= until


POLICY = Policy(decide, uses_fallbacks=True)
