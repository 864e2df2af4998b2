"""`CpuUsage`: CPU time of a router's process per request over the last minute."""

from collections import deque

WINDOW_SECONDS = 60.0
MIN_SECONDS = 5.0
"""Shortest measured time, and time between two samples."""
MIN_SHARE = 0.1
"""Share of a core below which the process's fixed costs hide those of requests."""


class CpuUsage:
    """Samples of a process's CPU seconds and received requests."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque()

    def sample(self, now: float, cpu_seconds: float, requests: float) -> float | None:
        """Return the CPU seconds of a request, given the totals so far; None if too little was done to tell."""
        samples = self._samples
        if not samples or now - samples[-1][0] >= MIN_SECONDS:
            samples.append((now, cpu_seconds, requests))
        while now - samples[0][0] > WINDOW_SECONDS and len(samples) > 1:
            samples.popleft()
        since, cpu_before, requests_before = samples[0]
        used, elapsed, received = cpu_seconds - cpu_before, now - since, requests - requests_before
        if elapsed < MIN_SECONDS or received <= 0 or used < MIN_SHARE * elapsed:
            return None
        return used / received
