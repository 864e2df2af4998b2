"""`Call`: a request that ingress passes to the router."""

import re
from dataclasses import dataclass

from trimtab_protocol import InferRequest
from trimtab_protocol.sanitize import header_value
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.validation import ValidatedRequest
from trimtab_router.execution.executor import Listener

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """A request with what its transport knows about it."""

    request: InferRequest
    arrived_at: float
    """Monotonic seconds."""
    deadline_seconds: float | None = None
    """Time left at arrival according to the transport, None if it gives no deadline."""
    request_id: str = ""
    """Bounded in length and safe for a header."""
    trace_parent: str = ""
    validated: ValidatedRequest | None = None
    """Result of `Router.validate`. None: the request is validated when it is served."""
    reservation: Reservation | None = None
    """Result of `Router.admit`. None: the request reserves no memory."""
    listener: Listener | None = None
    """Called with each chunk of a streamed response."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_id", header_value(self.request_id))
        object.__setattr__(self, "trace_parent", self.trace_parent if _TRACE_PARENT.match(self.trace_parent) else "")
