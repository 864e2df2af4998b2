"""How fast a processor is over time: machines that share their host with others are not equally fast at all times."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Work done per second, constant between given moments; 1 is the usual speed, 0 a pause.

    Args:
        since_seconds: [N] ascending, from the start of the simulation; the first speed also holds before its moment.
        speeds: [N], none negative, the last one above 0: what is begun must end.
    """

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
        """When work is done that takes so many seconds at the usual speed."""
        if work_seconds <= 0.0:
            return begin_seconds
        since, speeds, done = self.since_seconds, self.speeds, self._done
        at = max(bisect_right(since, begin_seconds) - 1, 0)
        target = done[at] + (begin_seconds - since[at]) * speeds[at] + work_seconds
        at = max(bisect_left(done, target) - 1, 0)
        return max(begin_seconds, since[at] + (target - done[at]) / speeds[at])
