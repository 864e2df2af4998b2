"""Scheduling priority of load clients, which in production have machines of their own.

With `sched_autogroup_enabled`, Linux schedules by session first, so the autogroup of the session gets the same
niceness. A priority that the process may not set stays as it is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


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
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):
        AUTOGROUP.write_text(str(niceness), encoding="ascii")
