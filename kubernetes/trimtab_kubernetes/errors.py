"""Errors of the Kubernetes API server, and backoff after them."""

import random

from trimtab_pipelines.errors import backoff


class ClusterError(Exception):
    """The API server refused a request or failed.

    `message`: the request and the response. `status`: HTTP status; 0 without a response. `retry_after_seconds`: delay
    that the server asks for.
    """

    def __init__(self, message: str, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after_seconds = status, retry_after_seconds


class Unreachable(ClusterError):
    """No response, a temporary failure (429, 5xx), or expired credentials (401)."""


class NotFound(ClusterError):
    """404: the object or kind does not exist."""


class Conflict(ClusterError):
    """409: another manager owns the field, or the object was changed."""


class Gone(ClusterError):
    """410: the resource version is too old; list again."""


class Rejected(ClusterError):
    """The request is invalid (400, 422) or forbidden (403); retrying does not help."""


_MISSING_KIND_MESSAGES = "failed to create typed patch object"
"""Server-side apply reports an unknown field with status 500, although retrying does not help."""


def error_for(status: int, message: str, retry_after: str = "") -> ClusterError:
    if _MISSING_KIND_MESSAGES in message:
        return Rejected(message, status)
    kinds: dict[int, type[ClusterError]] = {401: Unreachable, 404: NotFound, 409: Conflict, 410: Gone, 429: Unreachable}
    kind = kinds.get(status, Unreachable if status >= 500 else Rejected)
    asked_seconds = float(retry_after) if kind is Unreachable and retry_after.isdecimal() else 0.0
    return kind(message, status, asked_seconds)


class Backoff:
    """Exponential backoff of one retrying caller, with jitter; respects Retry-After."""

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
