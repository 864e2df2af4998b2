"""Environment of a simulation: measurable parameters of machines besides pipeline, profiles and arrivals."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica of a stage that dies; its batches return to the queue and another replica starts."""

    at_seconds: float
    stage: str


@dataclass(frozen=True, slots=True)
class Environment:
    """Parameters of the simulated machines."""

    startup_seconds: float = 8.0
    """From the start of a replica until it is ready (IPA reports about 8 s)."""
    reaction_seconds: float = 0.2
    """From a tick of the control loop until its plan is in force at the router."""
    before_seconds: float = 0.0
    """From the arrival of a request until its rows are queued."""
    spread: float = 1.0
    """Spread of service times around the profile's median, as a multiple of what its p99 says; 0 for none."""
    factors: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """By stage and variant: measured over expected batch times, equally likely; they replace `spread`."""
    contention: float = 0.0
    """Slowdown of a batch, as a share of its time, for each other replica that is busy when it begins."""
    speeds: tuple[MachineSpeed, ...] = ()
    """Recorded speed of each processor, to which replicas are assigned in turn; empty if all are equally fast."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Observed over profiled service time, by stage and variant."""
    size_ratios: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)
    """The same by rows of a batch, on top of that, interpolated linearly."""
    fan_out: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """Probabilities of 0, 1, 2 … rows per input row, by (stage, count output); else around the `expectedRows`."""
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time to load an operating point after running another one, if points are models of their own."""
    failures: tuple[Failure, ...] = ()
    """Replicas that die."""
