"""Scheduler time slice of a process, as the kernel reports it."""

import ctypes
import os
import platform
import struct

import pytest

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
SIZE = 48


def turn_seconds(pid: int) -> float:
    """Of a process's first thread; skips the test where the kernel has no turns of one's own."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests run in a class of their own (chrt), and so does what they start")
    number = GET_ATTRIBUTES.get(platform.machine())
    if number is None:
        pytest.skip(f"time slices cannot be read on {platform.machine()}")
    attributes = ctypes.create_string_buffer(SIZE)
    if ctypes.CDLL(None).syscall(ctypes.c_long(number), pid, attributes, SIZE, 0):
        pytest.skip("the kernel does not report time slices")
    *_, nanoseconds, _, _ = struct.unpack("=IIQiIQQQ", attributes.raw)
    if not nanoseconds:
        pytest.skip("turns of one's own came with Linux 6.12")
    return float(nanoseconds) / 1e9
