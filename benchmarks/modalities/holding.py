"""Holds a replica to its cores, as a cluster's limits do.

Where everything shares two cores, what is measured would else be who else wants them.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 10_000
_NUMBERS = count()
"""Of groups: several may be held at a time, each to its own cores."""


@contextmanager
def held(processes: Iterable[int], cores: float) -> Iterator[bool]:
    """Let these processes have so much of a core together while the block runs; tells whether this machine does so."""
    name = f"trimtab-bench-{os.getpid()}-{next(_NUMBERS)}"
    folder = next((f / name for f in (ROOT / "cpu", ROOT) if (f / "cgroup.procs").exists()), None)
    if folder is None or not _made(folder, cores):
        yield False
        return
    try:
        for process in processes:
            (folder / "cgroup.procs").write_text(str(process))
        yield True
    finally:
        for each in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                (folder.parent / "cgroup.procs").write_text(each)
        folder.rmdir()


def _made(folder: Path, cores: float) -> bool:
    """Make a group with so much of a core; leave none behind where its share cannot be set."""
    quota = round(cores * PERIOD_MICROSECONDS)
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        folder.rmdir()
        return False
    return True
