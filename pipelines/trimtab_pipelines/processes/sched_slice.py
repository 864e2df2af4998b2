"""CPU time slice of a process.

A process that wakes often for short work waits up to three milliseconds for a busy core each time. Since Linux 6.12 a
process can request its time slice: processes with long slices are preempted as soon as another wakes, and shares stay
fair. On other systems nothing changes.
"""

import ctypes
import os
import platform
import sys

MAX_SLICE_SECONDS = 0.1
"""For long computations that may be preempted."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""Number of the system call sched_setattr by machine; many C libraries have no function for it."""


class _Attributes(ctypes.Structure):
    """First version of the kernel's `sched_attr`."""

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
    """Request a time slice for this thread and the threads that it starts.

    Call it before threads are started; running threads keep theirs.

    Args:
        seconds: 0.0001 to 0.1; the kernel clamps other values.

    Returns:
        False on other systems, and for processes with their own scheduling class (`chrt`).
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes),
        policy=os.SCHED_OTHER,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime_nanoseconds=round(1e9 * seconds),
    )
    try:
        return not ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(attributes), 0)
    except (AttributeError, OSError):
        return False
