"""What the API server may answer instead of what was asked."""


class ClusterError(Exception):
    """The API server refused or failed.

    Args:
        message: what it answered to what.
        status: the HTTP status, 0 where there was no answer at all.
        retry_after_seconds: how long the server asks to be left alone.
    """

    def __init__(self, message: str, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_after_seconds = status, retry_after_seconds


class Unreachable(ClusterError):
    """No answer, one that says try again later (429 and 5xx), or that the credentials are out of date (401)."""


class NotFound(ClusterError):
    """404: no such object, or no such kind."""


class Conflict(ClusterError):
    """409: somebody else owns the field, or changed the object in between."""


class Gone(ClusterError):
    """410: the version asked for is too old to follow from; list anew."""


class Rejected(ClusterError):
    """The request is wrong (400, 422) or not allowed (403); sending it again changes nothing."""


_MISSING_KIND_MESSAGES = "failed to create typed patch object"
"""How server-side apply answers a field that the kind does not have: with status 500, though it will never pass."""


def error_for(status: int, message: str, retry_after: str = "") -> ClusterError:
    """The error that an HTTP status, the server's message and its Retry-After stand for."""
    if _MISSING_KIND_MESSAGES in message:
        return Rejected(message, status)
    kinds: dict[int, type[ClusterError]] = {401: Unreachable, 404: NotFound, 409: Conflict, 410: Gone, 429: Unreachable}
    kind = kinds.get(status, Unreachable if status >= 500 else Rejected)
    asked_seconds = float(retry_after) if kind is Unreachable and retry_after.isdecimal() else 0.0
    return kind(message, status, asked_seconds)
