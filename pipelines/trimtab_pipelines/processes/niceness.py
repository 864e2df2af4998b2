"""Shell: a process that lets others have the processors first, where those are short."""

import os
from contextlib import suppress
from pathlib import Path

from trimtab_pipelines.processes.sched_slice import MAX_SLICE_SECONDS, set_time_slice

OWN_SESSION = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Let others go first; the session says so too, where the kernel shares processors out by sessions.

    Ask before there are threads, from a process that has a session of its own.

    Args:
        niceness: how much, 0 (not at all) to 19.
    """
    if not niceness:
        return
    os.nice(niceness)
    set_time_slice(MAX_SLICE_SECONDS)  # whoever wakes for a moment need not wait for the end of a short one
    with suppress(OSError):
        OWN_SESSION.write_text(str(niceness), encoding="ascii")
