"""How long to wait after what failed: longer and longer, as long as the server asks, and not all at once."""

import random

from trimtab_kubernetes.errors import ClusterError
from trimtab_pipelines.backoff import backoff


class Backoff:
    """The pauses of one who tries again."""

    def __init__(self, initial_seconds: float, max_seconds: float) -> None:
        self._range = initial_seconds, max_seconds
        self.reset()

    def reset(self) -> None:
        """Begin anew: the next failure is another one."""
        self._next = backoff(*self._range)

    def next_seconds(self, error: Exception) -> float:
        """The pause after an error; no two who wait come back at the same moment."""
        asked_seconds = error.retry_after_seconds if isinstance(error, ClusterError) else 0.0
        return max(next(self._next) * random.uniform(0.5, 1.0), asked_seconds)  # noqa: S311
