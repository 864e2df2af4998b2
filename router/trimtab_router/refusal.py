"""`Refusal`: a request without a result: a reason, a message, and a code that ingress maps to a status."""

from trimtab_pipelines.request_outcome import (
    DROPPED,
    FAILED,
    OVERLOAD,
    REFUSED,
    ROUTER_REASONS,
    ErrorCode,
    RequestOutcome,
    is_client_error,
)
from trimtab_protocol.sanitize import printable

_OUTCOMES = {ErrorCode.INTERNAL: FAILED, ErrorCode.DEADLINE_EXCEEDED: DROPPED, ErrorCode.CANCELLED: DROPPED}
_RETRYABLE = frozenset({ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE})
RETRY_SECONDS = 1.0  # when a retry makes sense if nothing better is known


class Refusal(Exception):
    """A request that ends without a result.

    `reason` is one of `ROUTER_REASONS`, which determines the code. `message` names cause and remedy, and is bounded
    and printable. `retry_after_seconds` counts if the code says that a retry makes sense.
    """

    def __init__(
        self, reason: str, message: str, *, stage: str = "", retry_after_seconds: float = RETRY_SECONDS
    ) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.code = ROUTER_REASONS[reason]
        self.reason = reason
        self.stage = stage
        self.retry_after_seconds = retry_after_seconds if self.code in _RETRYABLE else None

    @property
    def outcome(self) -> RequestOutcome:
        return _OUTCOMES.get(self.code, REFUSED)

    @property
    def client_error(self) -> bool:
        """Whether the client alone is the cause, so that the pipeline's SLO attainment is not affected."""
        return is_client_error(self.code, self.reason)


def invalid(message: str) -> Refusal:
    return Refusal("InvalidArgument", message)


def unknown_model(name: str, *served: str) -> Refusal:
    return Refusal("UnknownModel", f"unknown model {name!r}; this router serves {', '.join(map(repr, served))}")


def failure(reason: str, message: str, request_id: str, *, stage: str = "") -> Refusal:
    """An internal error. Details and internal names go to the log only."""
    hint = f" for request id {request_id!r}" if request_id else ""
    return Refusal(reason, f"{message}; see the router's log{hint}", stage=stage)


def overload(cause: str) -> Refusal:
    return Refusal(OVERLOAD, f"the router is overloaded: {cause}; try again later")


def draining() -> Refusal:
    return Refusal("Draining", "this router is shutting down; try another")
