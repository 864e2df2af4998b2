"""Other CPU usage on the servers' core, which makes a measurement unreliable."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.cores import SERVER_CORE

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT = 3, 4


class Watched:
    """What of a core each process took; known once the watch has ended."""

    def __init__(self) -> None:
        self.others_share = 0.0
        """Of the servers' core: what went to processes which are not ours."""
        self.shares: dict[str, float] = {}
        """Of one core, by process: what each took, wherever it ran."""


@contextmanager
def watching(generator: int, processes: Mapping[str, int]) -> Iterator[Watched]:
    """Watch the servers' core, and what these processes take.

    Args:
        generator: the process that has a core of its own; all others below this one share the servers'.
        processes: more to be told of, by name.
    """
    watched, told = Watched(), {"generator": generator, **processes}
    began, busy, ours = time.monotonic(), _busy_seconds(), _our_seconds(generator)
    taken = {name: _seconds(psutil.Process(process)) for name, process in told.items()}
    yield watched
    wall_seconds = time.monotonic() - began
    others_seconds = _busy_seconds() - busy - (_our_seconds(generator) - ours)
    watched.others_share = round(max(others_seconds / wall_seconds, 0.0), 2)
    watched.shares = {
        name: round((_seconds(psutil.Process(process)) - taken[name]) / wall_seconds, 2)
        for name, process in told.items()
    }


def _busy_seconds() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    ticks = [
        int(number) for number in next(line for line in lines if line.startswith(f"cpu{SERVER_CORE} ")).split()[1:]
    ]
    return (sum(ticks[:8]) - ticks[_IDLE] - ticks[_IOWAIT]) / _TICKS_PER_SECOND


def _our_seconds(generator: int) -> float:
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        if process.pid != generator:
            seconds += _seconds(process)
    return seconds


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
