"""Machine speed during a run, from readings of probe processes.

A machine that shares its host changes its speed, and nothing in the pipeline's records explains a slow batch. One probe
per processor multiplies two small matrices 25 times per second, about 1 % of the processor's time, and records the CPU
time that it took and the time that the host took the processor away. One more process records the CPU usage of other
processes. The simulator replays this, as it replays the arrivals.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.harness.processors import CORES
from trimtab_adapter.simulation.environment import MachineSpeed
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

WINDOW_SECONDS = 0.25
SIDE, PERIOD_SECONDS = 192, 0.04
WATCH_SECONDS = 1.0
OTHERS = "others"
_TICK_SECONDS = 0.01
_STEAL_COLUMN = 8
Floats = NDArray[np.float64]
Readings = Floats
"""[N, 3]: Unix time at the end of a multiplication, its CPU seconds, seconds stolen by the host since the last row."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The machine's speed during a run; seconds count from the run's start."""

    slowness: Floats
    """[W] by window: time of the same work over its mean, of all processors together."""
    speeds: tuple[MachineSpeed, ...]
    """Speed of each processor, pauses included."""
    others: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """[N, 2]: second, and mean CPU seconds per processor of other processes since the last row."""

    def slowness_at(self, seconds: Floats) -> Floats:
        """Slowness at moments [N] of the run; 1 without probes."""
        if not self.slowness.size:
            return np.ones_like(seconds)
        windows = np.clip((seconds / WINDOW_SECONDS).astype(int), 0, self.slowness.size - 1)
        slowness: Floats = self.slowness[windows]
        return slowness

    @property
    def paused_seconds(self) -> float:
        """Mean seconds of all pauses per processor."""
        return self.paused(0.0, np.inf)

    def taken(self, begin: float, end: float) -> float:
        """Mean seconds per processor that the host or other processes took."""
        at, seconds = self.others.T
        return self.paused(begin, end) + max(float(seconds[(at > begin) & (at <= end)].sum()), 0.0)

    def paused(self, begin: float, end: float) -> float:
        pauses = [_paused_seconds(speed, begin, end) for speed in self.speeds]
        return sum(pauses) / len(pauses) if pauses else 0.0

    def without_pause(self, begin: Floats, end: Floats) -> NDArray[np.bool_]:
        """Whether no processor paused in each of these intervals [N]."""
        result = np.ones(begin.size, dtype=np.bool_)
        for speed in self.speeds:
            since, stopped = np.array([*speed.since_seconds, np.inf]), np.array(speed.speeds) == 0.0
            begins, ends = since[:-1][stopped], np.append(since[1:][stopped], np.inf)
            following = np.searchsorted(ends, begin, side="right")
            result &= np.append(begins, np.inf)[following] >= end
        return result


def machine_record(
    readings: Sequence[Readings], started_at: float, duration_seconds: float, others: Floats | None = None
) -> MachineRecord:
    """Compute the machine's speed from readings.

    Replicas move between processors, so all processors share one slowness. What the host took between two readings
    counts as one pause that ends with the later reading. The moments of other CPU usage are too imprecise for speeds.

    The run starts at a Unix time; `others` is [N, 2], Unix time and CPU seconds of other processes since the last row.
    """
    if not readings:
        return MachineRecord(np.empty(0), ())
    slowness = _slowness(np.concatenate(readings), started_at, int(np.ceil(duration_seconds / WINDOW_SECONDS)))
    speeds = tuple(_speed(slowness, _pauses(processor, started_at, duration_seconds)) for processor in readings)
    if others is None:
        return MachineRecord(slowness, speeds)
    return MachineRecord(slowness, speeds, (others - (started_at, 0.0)) / (1.0, len(readings)))


def _slowness(readings: Readings, started_at: float, windows: int) -> Floats:
    """Median work seconds by window over the mean of all windows; those without a reading are interpolated.

    The mean of a window would follow its outliers: a probe that wakes up on a busy processor finds its caches cold.
    """
    window = np.floor((readings[:, 0] - started_at) / WINDOW_SECONDS)
    inside = (window >= 0) & (window < windows)
    order = np.argsort(window[inside])
    filled, first = np.unique(window[inside][order], return_index=True)
    medians = [np.median(own) for own in np.split(readings[inside, 1][order], first[1:])]
    seconds = np.interp(np.arange(windows), filled, medians)
    slowness: Floats = seconds / seconds.mean()
    return slowness


def _pauses(readings: Readings, started_at: float, duration_seconds: float) -> list[tuple[float, float]]:
    """Pauses of a processor as (begin, end), ascending and disjoint."""
    pauses: list[tuple[float, float]] = []
    for at, work_seconds, stolen in readings.tolist():
        end = at - work_seconds - started_at
        begin = max(end - stolen, pauses[-1][1] if pauses else 0.0)
        if stolen and begin < end < duration_seconds:
            pauses.append((begin, end))
    return pauses


def _speed(slowness: Floats, pauses: Sequence[tuple[float, float]]) -> MachineSpeed:
    edges = {0.0} | {window * WINDOW_SECONDS for window in range(slowness.size)}
    edges |= {edge for pause in pauses for edge in pause}
    since = np.array(sorted(edges))
    speeds = 1.0 / slowness[np.clip((since / WINDOW_SECONDS).astype(int), 0, slowness.size - 1)]
    for begin, end in pauses:
        speeds[(since >= begin) & (since < end)] = 0.0
    return MachineSpeed(since.tolist(), speeds.tolist())


def _paused_seconds(speed: MachineSpeed, begin: float, end: float) -> float:
    lengths = np.diff(np.clip(speed.since_seconds, begin, end))
    return float(lengths[np.array(speed.speeds[:-1]) == 0.0].sum())


def probe(processor: int, out: Path) -> None:
    """Write readings of one processor until killed."""
    os.sched_setaffinity(0, {processor})
    left = np.random.default_rng(0).random((SIDE, SIDE), dtype=np.float32)
    right, product = left.T.copy(), np.empty_like(left)
    with out.open("w", buffering=1, encoding="ascii") as file:
        stolen = _stolen_seconds(processor)
        while True:
            time.sleep(PERIOD_SECONDS)
            began = time.thread_time()
            np.matmul(left, right, out=product)
            work_seconds = time.thread_time() - began
            before, stolen = stolen, _stolen_seconds(processor)
            file.write(f"{time.time():.6f} {work_seconds:.7f} {stolen - before:.3f}\n")


def _stolen_seconds(processor: int) -> float:
    with Path("/proc/stat").open(encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"cpu{processor} "))
    return int(line.split()[_STEAL_COLUMN]) * _TICK_SECONDS


def watch_others(root: int, out: Path) -> None:
    """Write the CPU usage of all processes but a process tree's until killed."""
    with out.open("w", buffering=1, encoding="ascii") as file:
        before = _others_seconds(root)
        while True:
            time.sleep(WATCH_SECONDS)
            now = _others_seconds(root)
            file.write(f"{time.time():.6f} {now - before:.3f}\n")
            before = now


def _others_seconds(root: int) -> float:
    total = psutil.cpu_times()
    busy = total.user + total.nice + total.system + total.irq + total.softirq
    parent = psutil.Process(root)
    return busy - sum(sum(process.cpu_times()[:4]) for process in (parent, *parent.children(recursive=True)))


@contextmanager
def probing(folder: Path) -> Iterator[list[Path]]:
    """Probe every processor during the block; yield the files of readings, none if processors cannot be chosen."""
    processors = sorted(CORES) if hasattr(os, "sched_setaffinity") else []
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"processor-{processor}.txt" for processor in processors]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    tasks = [(str(processor), str(file)) for processor, file in zip(processors, files, strict=True)]
    tasks += [(OTHERS, str(folder / OTHERS))] if processors else []
    commands = [command_tied_to_parent("benchmarks.simulator.machine", *task) for task in tasks]
    children = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        yield files
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def read_readings(folder: Path) -> tuple[list[Readings], Floats]:
    """Read each processor's readings and the CPU usage of others; the last line of a file may be incomplete."""
    others = _rows(folder / OTHERS) if (folder / OTHERS).exists() else np.empty((0, 2))
    return [_rows(file) for file in sorted(folder.glob("processor-*.txt"))], others


def _rows(file: Path) -> Floats:
    return np.array([line.split() for line in file.read_text().splitlines()[:-1]], dtype=float)


if __name__ == "__main__":
    if sys.argv[1] == OTHERS:
        watch_others(os.getppid(), Path(sys.argv[2]))
    else:
        probe(int(sys.argv[1]), Path(sys.argv[2]))
