"""Where callers stand in line for a processor: in life they have machines of their own.

Linux shares processors out by sessions first, where it is told to (`sched_autogroup_enabled`): so a session says, too,
how nice it is. What is not allowed is left as it is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWN_SESSION = Path("/proc/self/autogroup")


@contextmanager
def ahead(by: int) -> Iterator[None]:
    """Let this process, and its session, have a processor before those as nice as it was until now."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    _stand(usual - by)
    try:
        yield
    finally:
        _stand(usual)


def apart_and_behind(niceness: int) -> None:
    """Give this process a session of its own, which takes no processor from anybody who is less nice."""
    with suppress(PermissionError):  # it has one already
        os.setsid()
    _stand(niceness)


def _stand(niceness: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):
        OWN_SESSION.write_text(str(niceness), encoding="ascii")
