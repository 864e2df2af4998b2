"""Outcomes of a request, and the error codes and refusal reasons in responses and metrics.

Each received request has exactly one outcome, so the outcomes add up to the received requests.
"""

from enum import Enum, IntEnum


class RequestOutcome(IntEnum):
    """Outcome of a request: a number in records, a word in metrics and output."""

    OK = 0
    LATE = 1
    DROPPED = 2
    REFUSED = 3
    FAILED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


OK, LATE, DROPPED, REFUSED, FAILED = RequestOutcome
"""Module-level names for the per-request path, where looking up an enum member is slow."""


class ErrorCode(Enum):
    """Code of a refusal, by its gRPC name, with its HTTP status."""

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
ROUTER_REASONS = {
    reason: code
    for code, reasons in {
        ErrorCode.INVALID_ARGUMENT: ("InvalidArgument", "AccuracyFloor", "SuspectedQueryOfDeath"),
        ErrorCode.NOT_FOUND: ("NotFound", "UnknownModel", "UnknownVersion", "NoChats", "RouteNotServed"),
        ErrorCode.METHOD_NOT_ALLOWED: ("MethodNotAllowed",),
        ErrorCode.REQUEST_TIMEOUT: ("BodyTimeout",),
        ErrorCode.PAYLOAD_TOO_LARGE: ("PayloadTooLarge",),
        ErrorCode.RESOURCE_EXHAUSTED: (
            "Overload",
            "QueueFull",
            "BytesInFlight",
            "ClientConcurrencyLimited",
            "ClientBytesLimited",
        ),
        ErrorCode.CANCELLED: ("Cancelled",),
        ErrorCode.INTERNAL: ("InternalError", "ModelServerError", "NotRepeatable", "AnswerCut"),
        ErrorCode.UNIMPLEMENTED: ("CountsNothing",),
        ErrorCode.UNAVAILABLE: ("NoReplica", "NotCounted", "Draining"),
        ErrorCode.DEADLINE_EXCEEDED: ("DeadlineExpired", "DeadlineUnreachable"),
    }.items()
    for reason in reasons
}
"""Refusal reasons of the router, with their codes."""
CLIENT_LIMIT_REASONS = frozenset({"ClientRateLimited", "ClientConcurrencyLimited", "ClientBytesLimited"})
OVERLOAD = "Overload"
"""Too many requests in flight: the proxy has no capacity, or sheds load before it reads them."""
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
"""Refusal reasons of the proxy, with their HTTP status; over gRPC only the reason is reported."""


def is_client_error(code: ErrorCode, reason: str) -> bool:
    return code in CLIENT_ERRORS or reason in CLIENT_LIMIT_REASONS


def code_of(status: int) -> ErrorCode:
    """Code of an HTTP status; unknown ones are client errors below 500 and server errors from 500 on."""
    by_status = {code.value: code for code in ErrorCode}
    return by_status.get(status, ErrorCode.INVALID_ARGUMENT if status < 500 else ErrorCode.UNAVAILABLE)
