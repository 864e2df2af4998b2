"""The two processors that a benchmark parts its processes on: the first two that it may run on.

They are asked for once, before anything is pinned, since a pinned process may run on its own alone. A container may
have others than the machine's first (`docker run --cpuset-cpus=2,3`).
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final


def usable() -> frozenset[int]:
    """The processors that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def first_two(cores: Iterable[int]) -> tuple[int, int]:
    """The lowest two; where there is one alone it is both, so that to pin to either changes nothing."""
    ordered = sorted(cores)
    return ordered[0], ordered[min(1, len(ordered) - 1)]


CORES: Final = usable()
SERVER_CORE, CLIENT_CORE = first_two(CORES)


def pin(core: int) -> None:
    """Keep this process, and those it starts from now on, on one core."""
    os.sched_setaffinity(0, {core})


def pin_threads(process: int, cores: Iterable[int]) -> None:
    """Keep all threads of a process on these cores."""
    wanted = set(cores)
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), wanted)
