"""A request on its way from ingress to the router. Pure."""

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
    """A request as ingress hands it over.

    `arrived_at` is in monotonic seconds; `deadline_seconds` is what the transport said was left then, None if nothing.
    `admitted` is what `Router.admit` made of the request, `reservation` what `Router.visit` gave it; without them it is
    admitted when served, and holds nothing. `listener` is told of each piece of an answer that a stage writes.
    Ids are kept bounded and fit for a header, whatever they were.
    """

    request: InferRequest
    arrived_at: float
    deadline_seconds: float | None = None
    request_id: str = ""
    trace_parent: str = ""
    admitted: ValidatedRequest | None = None
    reservation: Reservation | None = None
    listener: Listener | None = None

    def __post_init__(self) -> None:
        """Clean what travels on in headers."""
        object.__setattr__(self, "request_id", header_value(self.request_id))
        object.__setattr__(self, "trace_parent", self.trace_parent if _TRACE_PARENT.match(self.trace_parent) else "")
