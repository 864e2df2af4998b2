"""Who else was on the servers' core: figures of a time in which others took much of it say little."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.router.processes import SERVER_CORE

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT = 3, 4


class Watched:
    """The share of the core that went to processes which are not ours; known once the watch has ended."""

    others_share = 0.0


@contextmanager
def watching(generator: int) -> Iterator[Watched]:
    """Watch the servers' core.

    Args:
        generator: the process that has a core of its own; all others below this one share the servers'.
    """
    watched = Watched()
    began, busy, ours = time.monotonic(), _busy_seconds(), _our_seconds(generator)
    yield watched
    wall_seconds = time.monotonic() - began
    others_seconds = _busy_seconds() - busy - (_our_seconds(generator) - ours)
    watched.others_share = round(max(others_seconds / wall_seconds, 0.0), 2)


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
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds
