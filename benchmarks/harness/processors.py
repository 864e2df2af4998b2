"""Processors and scheduling priorities of the processes of a benchmark.

Servers run on the first processor that this process may use and clients on the second; with only one, it is both. They
are read once, since a pinned process may use its own alone.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

AUTOGROUP: Final = Path("/proc/self/autogroup")
CORES: Final = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def first_two(cores: Iterable[int]) -> tuple[int, int]:
    """Return the two lowest processors; the same one twice if there is only one."""
    ordered = sorted(cores)
    return ordered[0], ordered[min(1, len(ordered) - 1)]


SERVER_CORE, CLIENT_CORE = first_two(CORES)


def pin(core: int) -> None:
    """Pin this process, and those that it starts from now on, to a core."""
    os.sched_setaffinity(0, {core})


def pin_threads(process: int, cores: Iterable[int]) -> None:
    """Pin all threads of a process to some cores."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), set(cores))


def cpu_seconds(process: int) -> float:
    """Return the processor time of all threads of a process, in nanosecond resolution."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


@contextmanager
def raise_priority(by: int) -> Iterator[None]:
    """Lower the niceness of this process and its session while the context lasts."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    _set_niceness(niceness - by)
    try:
        yield
    finally:
        _set_niceness(niceness)


def lower_priority(niceness: int) -> None:
    """Move this process to its own session with a niceness."""
    with suppress(PermissionError):  # the process already leads a session
        os.setsid()
    _set_niceness(niceness)


def _set_niceness(niceness: int) -> None:
    """Set a niceness, if the process may.

    With `sched_autogroup_enabled`, Linux schedules by session first, so the session's autogroup gets it too.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):
        AUTOGROUP.write_text(str(niceness), encoding="ascii")
