"""`Refusal`: a request that ends without a result, with one error code, a reason and a message.

Ingress maps the code to an HTTP or gRPC status. No other part of the router knows either protocol.
"""

from trimtab_pipelines.error_codes import ErrorCode, is_client_error
from trimtab_pipelines.request_outcome import DROPPED, FAILED, REFUSED, RequestOutcome
from trimtab_protocol import ProtocolError
from trimtab_protocol.sanitize import printable

_OUTCOMES = {ErrorCode.INTERNAL: FAILED, ErrorCode.DEADLINE_EXCEEDED: DROPPED, ErrorCode.CANCELLED: DROPPED}


class Refusal(Exception):
    """A request that ends without a result.

    Args:
        code: says whether the client or the server is at fault, and whether a retry can help.
        reason: stable CamelCase name for metrics, for example `QueueFull`.
        message: names the cause and the remedy. Bounded in length and free of control characters.
        stage: stage at which the request ended, empty before the first stage.
        retry_after_seconds: when a retry makes sense, None if it does not.
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
    def outcome(self) -> RequestOutcome:
        """Outcome that the request counts as: dropped, refused or failed."""
        return _OUTCOMES.get(self.code, REFUSED)

    @property
    def client_error(self) -> bool:
        """Whether the client alone is the cause, so that the pipeline's SLO attainment is not affected."""
        return is_client_error(self.code, self.reason)


def invalid(message: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_ARGUMENT, "InvalidArgument", message)


def invalid_for(reason: str, message: str, *, stage: str = "") -> Refusal:
    """An invalid request with a specific reason."""
    return Refusal(ErrorCode.INVALID_ARGUMENT, reason, message, stage=stage)


def oversize(message: str) -> Refusal:
    return Refusal(ErrorCode.PAYLOAD_TOO_LARGE, "PayloadTooLarge", message)


def not_found(message: str) -> Refusal:
    return Refusal(ErrorCode.NOT_FOUND, "NotFound", message)


def wrong_method(message: str) -> Refusal:
    return Refusal(ErrorCode.METHOD_NOT_ALLOWED, "MethodNotAllowed", message)


def failure(reason: str, message: str, request_id: str, *, stage: str = "") -> Refusal:
    """An internal error. Details and internal names go to the log only."""
    hint = f" for request id {request_id!r}" if request_id else ""
    return Refusal(ErrorCode.INTERNAL, reason, f"{message}; see the router's log{hint}", stage=stage)


def overload(cause: str) -> Refusal:
    """A request rejected because the router cannot serve it in time."""
    message = f"the router is overloaded: {cause}; try again later"
    return Refusal(ErrorCode.RESOURCE_EXHAUSTED, "Overload", message, retry_after_seconds=1.0)


def malformed(error: ProtocolError) -> Refusal:
    return invalid(str(error))


def draining() -> Refusal:
    message = "this router is shutting down; try another"
    return Refusal(ErrorCode.UNAVAILABLE, "Draining", message, retry_after_seconds=1.0)


def too_many_rows(stage: str, rows: int, most: int) -> Refusal:
    return invalid(f"stage {stage}: {rows} rows in one request; send at most {most}")


def queue_full(stage: str, rows: int, most: int, wait_seconds: float) -> Refusal:
    return Refusal(
        ErrorCode.RESOURCE_EXHAUSTED,
        "QueueFull",
        f"stage {stage}: its queue holds {rows} rows of at most {most}; try again later",
        stage=stage,
        retry_after_seconds=max(wait_seconds, 1.0),
    )


def no_replica(stage: str, waited_seconds: float) -> Refusal:
    return Refusal(
        ErrorCode.UNAVAILABLE,
        "NoReplica",
        f"stage {stage}: no replica became ready while the request waited {waited_seconds:.3f} s",
        stage=stage,
        retry_after_seconds=1.0,
    )


def deadline_passed(stage: str, waited_seconds: float) -> Refusal:
    message = f"dropped at stage {stage}: its deadline passed after {waited_seconds:.3f} s in the queue"
    return Refusal(ErrorCode.DEADLINE_EXCEEDED, "DeadlineExpired", message, stage=stage)


def deadline_unreachable(
    stage: str, left_seconds: float, *, wait_seconds: float, service_seconds: float, later_seconds: float
) -> Refusal:
    message = (
        f"dropped at stage {stage}: {left_seconds:.3f} s are left to its deadline, but it needs "
        f"{wait_seconds:.3f} s in the queue, {service_seconds:.3f} s in this stage and {later_seconds:.3f} s after it"
    )
    return Refusal(ErrorCode.DEADLINE_EXCEEDED, "DeadlineUnreachable", message, stage=stage)


def too_inaccurate(stage: str, floor: float, best: float) -> Refusal:
    message = (
        f"stage {stage}: its accuracy must be {floor:.4f} for the floor that the request wishes, but no operating "
        f"point of the plan in force gives more than {best:.4f}; lower the floor"
    )
    return Refusal(ErrorCode.INVALID_ARGUMENT, "AccuracyFloor", message, stage=stage)
