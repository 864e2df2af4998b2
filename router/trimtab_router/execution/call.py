"""`Call`: a request that the pipeline can serve, with what its transport knows about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab_protocol import InferRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.request_options import NO_OPTIONS, RequestOptions

Listener = Callable[[int, Chunk | LastChunk], None]
"""Called with the row and its next chunk."""


@dataclass(slots=True)
class Call:
    """A valid request. Parsing sets its contents, and ingress what its transport knows."""

    request: InferRequest
    """Description of the request as received, without tensors."""
    inputs: Mapping[str, Array]
    requested_outputs: tuple[str, ...]
    options: RequestOptions = NO_OPTIONS
    images: int = 0
    """Number of images per chat."""
    arrived_at: float = 0.0
    """Seconds of the executor's clock."""
    deadline_seconds: float | None = None
    """Time left at arrival according to the transport, None if it gives no deadline."""
    request_id: str = ""
    """Forwarded as `x-request-id`: bounded in length and safe for a header."""
    trace_parent: str = ""
    """Forwarded as `traceparent`, empty unless it is valid."""
    listener: Listener | None = None
    """Called with each chunk of a streamed response."""
    hold_bytes: Callable[[int], None] | None = None
    """Called with the size of each stage's outputs, which are stored until the request ends."""
