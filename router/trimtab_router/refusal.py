"""Why a request gets no result: one code, one message, and what the caller may do about it.

Ingress turns the code into a gRPC status or an HTTP status; nothing else in the router knows either transport.
"""

from enum import Enum

from trimtab_protocol import ProtocolError


class Code(Enum):
    """What kind of refusal, by the name gRPC gives it, with its HTTP status."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    REQUEST_TIMEOUT = 408
    PAYLOAD_TOO_LARGE = 413
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504


_OUTCOMES = {Code.INTERNAL: "failed", Code.DEADLINE_EXCEEDED: "dropped", Code.CANCELLED: "dropped"}


class Refusal(Exception):  # noqa: N818 - an answer to the caller, not an error of ours
    """A request that ends without a result.

    Args:
        code: whose fault it is and whether trying again helps.
        reason: CamelCase, stable, for metrics (`QueueFull`).
        message: names the culprit and says what would be right.
        stage: where it happened, empty before the first stage.
        retry_after_seconds: when trying again makes sense; None where it does not.
    """

    def __init__(
        self, code: Code, reason: str, message: str, *, stage: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.stage = stage
        self.retry_after_seconds = retry_after_seconds

    @property
    def outcome(self) -> str:
        """The outcome it counts as: dropped, refused or failed."""
        return _OUTCOMES.get(self.code, "refused")


def invalid(message: str) -> Refusal:
    """The caller's fault."""
    return Refusal(Code.INVALID_ARGUMENT, "InvalidArgument", message)


def malformed(error: ProtocolError) -> Refusal:
    """A message that breaks the protocol."""
    return invalid(str(error))
