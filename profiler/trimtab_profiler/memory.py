"""Measurement of a replica's resident memory, by batch size."""

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from trimtab_pipelines.memory_profile import MemoryProfile

RESIDENT, PEAK = "VmRSS", "VmHWM"


def read_bytes(pid: int, field: str) -> int:
    """A size in the status of a process; OSError if it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak(pid: int) -> None:
    """Begin the peak of a process anew; OSError if the system does not allow it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


async def measure_memory(
    pid: int, serve: Callable[[int], Awaitable[None]], sizes: Sequence[int], longest_seconds: float
) -> MemoryProfile | None:
    """Serve batches of ascending sizes until one takes too long; None on a system that does not show peaks."""
    try:
        loaded, start_peak = read_bytes(pid, RESIDENT), read_bytes(pid, PEAK)
        peaks: dict[int, int] = {}
        for size in sizes:
            forget_peak(pid)
            started = time.perf_counter()
            await serve(size)
            peaks[size] = read_bytes(pid, PEAK)
            if time.perf_counter() - started > longest_seconds:
                break
    except OSError:
        return None
    return MemoryProfile(loaded_bytes=loaded, start_peak_bytes=start_peak, peak_bytes=peaks)
