"""Why a request gets no result: one code, one message, and what the caller may do about it.

Ingress turns the code into a gRPC status or an HTTP status; nothing else in the router knows either transport.
"""

from trimtab_pipelines.error_codes import ErrorCode, is_client_error
from trimtab_pipelines.request_outcome import DROPPED, FAILED, REFUSED, RequestOutcome
from trimtab_protocol import ProtocolError
from trimtab_protocol.sanitize import printable

_ENDS = {ErrorCode.INTERNAL: FAILED, ErrorCode.DEADLINE_EXCEEDED: DROPPED, ErrorCode.CANCELLED: DROPPED}


class Refusal(Exception):
    """A request that ends without a result.

    Args:
        code: whose fault it is and whether trying again helps.
        reason: CamelCase, stable, for metrics (`QueueFull`).
        message: names the culprit and says what would be right; kept bounded and free of control characters.
        stage: where it happened, empty before the first stage.
        retry_after_seconds: when trying again makes sense; None where it does not.
    """

    def __init__(
        self, code: ErrorCode, reason: str, message: str, *, stage: str = "", retry_after_seconds: float | None = None
    ) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.code = code
        self.reason = reason
        self.stage = stage
        self.retry_after_seconds = retry_after_seconds

    @property
    def end(self) -> RequestOutcome:
        """The end it counts as: dropped, refused or failed."""
        return _ENDS.get(self.code, REFUSED)

    @property
    def callers_fault(self) -> bool:
        """Whether the caller alone is the cause, so that it says nothing about how well the pipeline serves."""
        return is_client_error(self.code, self.reason)


def invalid(message: str) -> Refusal:
    """The caller's fault."""
    return Refusal(ErrorCode.INVALID_ARGUMENT, "InvalidArgument", message)


def invalid_for(reason: str, message: str, *, stage: str = "") -> Refusal:
    """The caller's fault, by a name of its own."""
    return Refusal(ErrorCode.INVALID_ARGUMENT, reason, message, stage=stage)


def oversize(message: str) -> Refusal:
    """What the caller sends is more than is taken."""
    return Refusal(ErrorCode.PAYLOAD_TOO_LARGE, "PayloadTooLarge", message)


def not_found(message: str) -> Refusal:
    """Nothing is served at the path."""
    return Refusal(ErrorCode.NOT_FOUND, "NotFound", message)


def wrong_method(message: str) -> Refusal:
    """What is served at the path is asked for by another method."""
    return Refusal(ErrorCode.METHOD_NOT_ALLOWED, "MethodNotAllowed", message)


def failure(reason: str, what: str, request_id: str, *, stage: str = "") -> Refusal:
    """Our fault: the caller learns what failed and where to look; texts and names of the inside stay in the log."""
    where = f" under request id {request_id!r}" if request_id else ""
    return Refusal(ErrorCode.INTERNAL, reason, f"{what}; the router's log says more{where}", stage=stage)


def overload(what: str) -> Refusal:
    """More is asked of this router than it can serve in time."""
    message = f"the router is overloaded: {what}; try again later"
    return Refusal(ErrorCode.RESOURCE_EXHAUSTED, "Overload", message, retry_after_seconds=1.0)


def malformed(error: ProtocolError) -> Refusal:
    """A message that breaks the protocol."""
    return invalid(str(error))
