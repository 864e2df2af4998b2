"""Machine speed from the readings of its probes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.simulation.machine_speed import MachineSpeed

WINDOW_SECONDS = 0.25
Floats = NDArray[np.float64]
Readings = Floats
"""[N, 3]: Unix time at the end of a piece of work, the processor seconds it took, and for how many seconds the host had
taken the processor away since the reading before."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the machine was in a run of so many seconds."""

    slowness: Floats
    """[W] by window: how much longer the same work took than usual, on all processors together."""
    speeds: tuple[MachineSpeed, ...]
    """The same a processor, its pauses included."""
    others: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """[N, 2]: second of the run, and how long a processor, on average, had computed for others since the row before."""

    def slowness_at(self, seconds: Floats) -> Floats:
        """How slow it was at moments of the run; 1 where nothing was probed."""
        if not self.slowness.size:
            return np.ones_like(seconds)
        found: Floats = self.slowness[np.clip((seconds / WINDOW_SECONDS).astype(int), 0, self.slowness.size - 1)]
        return found

    @property
    def paused_seconds(self) -> float:
        """Seconds of all pauses, by processor on average."""
        return self.paused(0.0, np.inf)

    def away(self, begin: float, until: float) -> float:
        """The seconds that the host or other processes took, by processor on average."""
        at, seconds = self.others.T
        taken = seconds[(at > begin) & (at <= until)].sum()
        return self.paused(begin, until) + max(float(taken), 0.0)

    def paused(self, begin: float, until: float) -> float:
        """The seconds of all pauses between two seconds of the run, by processor on average."""
        pauses = [_paused(speed, begin, until) for speed in self.speeds]
        return sum(pauses) / len(pauses) if pauses else 0.0

    def calm(self, begin: Floats, until: Floats) -> NDArray[np.bool_]:
        """Between which of these seconds of the run [N] no processor paused."""
        found = np.ones(begin.size, dtype=np.bool_)
        for speed in self.speeds:
            since, stopped = np.array([*speed.since_seconds, np.inf]), np.array(speed.speeds) == 0.0
            froms, untils = since[:-1][stopped], np.append(since[1:][stopped], np.inf)
            following = np.searchsorted(untils, begin, side="right")
            found &= np.append(froms, np.inf)[following] >= until
        return found


def pace(
    readings: Sequence[Readings], started_at: float, duration_seconds: float, others: Floats | None = None
) -> Pace:
    """Make of readings how fast the machine was; `started_at` is the Unix time of the run's second 0.

    Which processor a replica runs on changes all the time, so all share one slowness. What the host took away between
    two readings counts as one pause that ended with the later one. The moments at which others computed are not known
    so well, so they are no part of any speed.

    Args:
        readings: of each processor.
        started_at: Unix time.
        duration_seconds: of the run.
        others: [N, 2], Unix time, and processor seconds of others since the row before.
    """
    if not readings:
        return Pace(np.empty(0), ())
    windows = int(np.ceil(duration_seconds / WINDOW_SECONDS))
    slowness = np.mean([_slowness(one, started_at, windows) for one in readings], axis=0)
    slowness /= slowness.mean()
    speeds = tuple(_speed(slowness, _pauses(one, started_at, duration_seconds)) for one in readings)
    if others is None:
        return Pace(slowness, speeds)
    return Pace(slowness, speeds, (others - (started_at, 0.0)) / (1.0, len(readings)))


def _slowness(readings: Readings, started_at: float, windows: int) -> Floats:
    """By window the mean seconds of the work over its mean in the run; the neighbours' where none was done."""
    which = np.floor((readings[:, 0] - started_at) / WINDOW_SECONDS).astype(int)
    inside = (which >= 0) & (which < windows)
    took = np.minimum(readings[inside, 1], 10.0 * np.median(readings[inside, 1]))
    count = np.bincount(which[inside], minlength=windows)
    known = np.flatnonzero(count)
    means = np.bincount(which[inside], took, minlength=windows)[known] / count[known]
    found: Floats = np.interp(np.arange(windows), known, means) / means.mean()
    return found


def _pauses(readings: Readings, started_at: float, duration_seconds: float) -> list[tuple[float, float]]:
    """When a processor was away, as (from, until), ascending and apart."""
    found: list[tuple[float, float]] = []
    for at, took, stolen in readings.tolist():
        until = at - took - started_at
        begin = max(until - stolen, found[-1][1] if found else 0.0)
        if stolen and begin < until < duration_seconds:
            found.append((begin, until))
    return found


def _speed(slowness: Floats, pauses: Sequence[tuple[float, float]]) -> MachineSpeed:
    """Put pauses into the speeds of the windows."""
    edges = {0.0} | {n * WINDOW_SECONDS for n in range(slowness.size)}
    edges |= {edge for pause in pauses for edge in pause}
    since = np.array(sorted(edges))
    speeds = 1.0 / slowness[np.clip((since / WINDOW_SECONDS).astype(int), 0, slowness.size - 1)]
    for begin, until in pauses:
        speeds[(since >= begin) & (since < until)] = 0.0
    return MachineSpeed(since.tolist(), speeds.tolist())


def _paused(speed: MachineSpeed, begin: float, until: float) -> float:
    lengths = np.diff(np.clip(speed.since_seconds, begin, until))
    return float(lengths[np.array(speed.speeds[:-1]) == 0.0].sum())
