"""`Limits`: bounds on memory and time of a router process, and the sizes counted against them."""

from dataclasses import dataclass, replace
from math import prod
from typing import Self

from trimtab_pipelines.edge_settings import ClientLimits
from trimtab_protocol import PendingRequest
from trimtab_protocol.tensors import BYTES, SLOW_VALUES_BYTES
from trimtab_router.admission.validation import ValidatedRequest
from trimtab_router.envoy.memory_limits import MEBIBYTE
from trimtab_router.scheduling.expiry import GRACE_SECONDS

JSON_MULTIPLE = 16
"""Memory of parsed JSON as a multiple of its text: a number of two characters becomes an object of 28 bytes and a
pointer."""
BYTES_ELEMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router process."""

    max_bytes_in_flight: int = 256 * MEBIBYTE
    max_payload_bytes: int = 64 * MEBIBYTE
    max_json_bytes: int = MEBIBYTE
    """Bound on JSON bodies, JSON headers and typed gRPC contents, which need many times their size once parsed."""
    max_response_bytes: int = 0
    """Bound on a model server's response if the stage leaves its size open. 0: twice the largest payload."""
    max_client_requests: int = 0
    """Requests in flight per client. 0: no bound."""
    max_client_bytes: int = 0
    """Bytes in flight per client. 0: no bound."""
    body_seconds: float = 0.0
    """Time for a body to arrive. 0: the SLO, at least 10 s."""
    grace_seconds: float = GRACE_SECONDS
    """Time that rows stay queued while no replica of their stage is ready."""
    hang_seconds: float = 5.0
    """Minimum time after which a replica that does not respond counts as lost."""

    def with_client_limits(self, clients: ClientLimits) -> Self:
        """These limits with the per-client limits of the edge settings."""
        return replace(self, max_client_requests=clients.concurrency, max_client_bytes=clients.in_flight)

    @property
    def response_bytes(self) -> int:
        """Bound on a model server's response whose size the stage leaves open."""
        return self.max_response_bytes or 2 * self.max_payload_bytes

    @property
    def json_bytes(self) -> int:
        """Maximum bytes of JSON, considering the memory that parsing needs."""
        affordable = max(self.max_bytes_in_flight // JSON_MULTIPLE, SLOW_VALUES_BYTES)
        return min(self.max_json_bytes, self.max_payload_bytes, affordable)


def decoding_bytes(pending: PendingRequest, received_bytes: int) -> int:
    """Memory that decoding needs in addition to the bytes received."""
    strings = [prod(tensor.shape) for tensor in pending.inputs if tensor.datatype == BYTES]
    string_bytes = 2 * received_bytes + BYTES_ELEMENT_BYTES * sum(strings) if strings else 0
    return (JSON_MULTIPLE - 1) * pending.written_bytes + string_bytes


def decoded_bytes(validated: ValidatedRequest) -> int:
    """Memory of the decoded tensors that is not shared with the bytes received."""
    total = 0
    for array in validated.inputs.values():
        if array.dtype.hasobject:
            total += BYTES_ELEMENT_BYTES * array.size + sum(map(len, array.reshape(-1)))
        elif array.flags.writeable:  # arrays decoded in place are read-only
            total += array.nbytes
    return total
