"""Niceness of a process."""

import os
from contextlib import suppress
from pathlib import Path

from trimtab_pipelines.processes.sched_slice import MAX_SLICE_SECONDS, set_time_slice

OWN_SESSION = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, and of its session if the kernel schedules by sessions.

    Call it before threads are started, from a process with its own session.

    Args:
        niceness: 0 (unchanged) to 19.
    """
    if not niceness:
        return
    os.nice(niceness)
    set_time_slice(MAX_SLICE_SECONDS)  # lets briefly running processes preempt this one
    with suppress(OSError):
        OWN_SESSION.write_text(str(niceness), encoding="ascii")
