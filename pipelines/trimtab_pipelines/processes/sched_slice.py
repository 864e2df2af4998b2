"""Shell: how long a process computes at a time where others want the same core.

A process that wakes often and works briefly waits for whoever has the core, up to three milliseconds each time. Linux
since 6.12 lets a process say how long its turns shall be: who takes long ones is interrupted as soon as another wakes,
and everybody still gets his share. Elsewhere nothing changes.
"""

import ctypes
import os
import platform
import sys

MAX_SLICE_SECONDS = 0.1
"""For who computes for a while, and may be interrupted."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""The number of sched_setattr by machine; the C library of many systems has no function for it."""


class _Attributes(ctypes.Structure):
    """The first version of the kernel's `sched_attr`."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_nanoseconds", ctypes.c_uint64),
        ("deadline_nanoseconds", ctypes.c_uint64),
        ("period_nanoseconds", ctypes.c_uint64),
    )


def set_time_slice(seconds: float) -> bool:
    """Ask that the turns of this thread, and of all that it starts, be so long.

    Threads that run already keep theirs, so ask before there are any.

    Args:
        seconds: 0.0001 to 0.1; the kernel takes the nearest of these.

    Returns:
        False where nobody was asked: on other systems, and where the process has a class of its own (`chrt`).
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    asked = _Attributes(
        size=ctypes.sizeof(_Attributes),
        policy=os.SCHED_OTHER,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime_nanoseconds=round(1e9 * seconds),
    )
    try:
        return not ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(asked), 0)
    except (AttributeError, OSError):
        return False
