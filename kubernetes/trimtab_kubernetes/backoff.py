"""`Backoff`: exponential backoff with jitter that respects Retry-After."""

import random

from trimtab_kubernetes.errors import ClusterError
from trimtab_pipelines.backoff import backoff


class Backoff:
    """Backoff of one retrying caller."""

    def __init__(self, initial_seconds: float, max_seconds: float) -> None:
        self._range = initial_seconds, max_seconds
        self.reset()

    def reset(self) -> None:
        """Start over: the next failure is independent."""
        self._next = backoff(*self._range)

    def next_seconds(self, error: Exception) -> float:
        """Seconds to wait after an error, with jitter, so that callers do not retry at the same time."""
        asked_seconds = error.retry_after_seconds if isinstance(error, ClusterError) else 0.0
        return max(next(self._next) * random.uniform(0.5, 1.0), asked_seconds)  # noqa: S311
