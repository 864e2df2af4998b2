"""Processor speed over time, for machines that share their host with others."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Work done per second, constant between the given times; 1 is the usual speed, 0 a pause."""

    since_seconds: Sequence[float]
    speeds: Sequence[float]
    _done: Sequence[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.since_seconds) != len(self.speeds) or not self.speeds:
            raise ValueError("a processor's speed needs a moment for each of its speeds, and at least one")
        lengths = [late - early for early, late in pairwise(self.since_seconds)]
        if min(lengths, default=1.0) <= 0.0 or min(self.speeds) < 0.0 or self.speeds[-1] <= 0.0:
            raise ValueError("a processor's speed needs ascending moments, no negative speed and a last one above 0")
        work = (length * speed for length, speed in zip(lengths, self.speeds, strict=False))
        object.__setattr__(self, "_done", tuple(accumulate(work, initial=0.0)))

    def finish(self, begin_seconds: float, work_seconds: float) -> float:
        """The time at which work is done that takes this long at the usual speed."""
        if work_seconds <= 0.0:
            return begin_seconds
        since, speeds, done = self.since_seconds, self.speeds, self._done
        at = max(bisect_right(since, begin_seconds) - 1, 0)
        target = done[at] + (begin_seconds - since[at]) * speeds[at] + work_seconds
        at = max(bisect_left(done, target) - 1, 0)
        return max(begin_seconds, since[at] + (target - done[at]) / speeds[at])
