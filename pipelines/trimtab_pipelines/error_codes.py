"""Why a request was refused, as answers and metrics name it: what router and dashboards share. Pure."""

from enum import Enum


class ErrorCode(Enum):
    """What kind of refusal, by the name gRPC gives it, with its HTTP status."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    METHOD_NOT_ALLOWED = 405
    REQUEST_TIMEOUT = 408
    PAYLOAD_TOO_LARGE = 413
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504


CLIENT_ERRORS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.NOT_FOUND,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.PAYLOAD_TOO_LARGE,
    }
)
CLIENT_LIMIT_REASONS = frozenset({"ClientRateLimited", "ClientConcurrencyLimited", "ClientBytesLimited"})
OVERLOAD = "Overload"
"""Too many requests are under way: the door refuses for want of room, or in a flood before it reads."""
PROXY_REASONS = {
    "Malformed": 400,
    "Unauthenticated": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "RequestTimeout": 408,
    "PayloadTooLarge": 413,
    "ClientRateLimited": 429,
    OVERLOAD: 429,
    "HeadersTooLarge": 431,
    "RouterUnavailable": 503,
}
"""Why the door refuses, with the HTTP status; over gRPC the status is always 200, and the reason says which it is."""


def is_client_error(code: ErrorCode, reason: str) -> bool:
    """Whether what is refused so is the caller's own doing."""
    return code in CLIENT_ERRORS or reason in CLIENT_LIMIT_REASONS


def code_of(status: int) -> ErrorCode:
    """The code of an HTTP status; one that is nobody's is the caller's fault below 500, and from there on ours."""
    known = {code.value: code for code in ErrorCode}
    return known.get(status, ErrorCode.INVALID_ARGUMENT if status < 500 else ErrorCode.UNAVAILABLE)
