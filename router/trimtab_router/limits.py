"""Bounds that keep a router's process small, whatever is asked of it, and what it counts against them. Pure."""

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
"""Of its size, what JSON of numbers costs while it is read: a number of two bytes is an object of 28 and a pointer."""
BYTES_ELEMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep the process small and its callers from waiting in vain, whatever is asked of it.

    `max_json_bytes` is of JSON bodies and headers and of typed gRPC contents, which cost many times their size, and
    `max_answer_bytes` of a model server's answer whose size the stage leaves open (0: twice the largest payload).
    `body_seconds` is how long a body may take to arrive (0: by the SLO, and not less than 10 s). The bounds for each
    client are 0 where there are none. `grace_seconds` is how long rows are held while no replica of their stage is
    ready, `hang_seconds` the least time after which a replica that does not answer counts as lost.
    """

    max_bytes_in_flight: int = 256 * MEBIBYTE
    max_payload_bytes: int = 64 * MEBIBYTE
    max_json_bytes: int = MEBIBYTE
    max_answer_bytes: int = 0
    max_client_requests: int = 0
    max_client_bytes: int = 0
    body_seconds: float = 0.0
    grace_seconds: float = GRACE_SECONDS
    hang_seconds: float = 5.0

    def with_clients(self, clients: ClientLimits) -> Self:
        """The same with the bounds that a door's settings set for each client."""
        return replace(self, max_client_requests=clients.concurrency, max_client_bytes=clients.in_flight)

    @property
    def answer_bytes(self) -> int:
        """The most bytes of an answer whose size is open."""
        return self.max_answer_bytes or 2 * self.max_payload_bytes

    @property
    def json_bytes(self) -> int:
        """The most bytes of JSON that can be taken, all they cost considered; little costs nothing to speak of."""
        affordable = max(self.max_bytes_in_flight // JSON_MULTIPLE, SLOW_VALUES_BYTES)
        return min(self.max_json_bytes, self.max_payload_bytes, affordable)


def decoding_bytes(pending: PendingRequest, received_bytes: int) -> int:
    """What decoding costs beside the bytes received."""
    strings = [prod(tensor.shape) for tensor in pending.inputs if tensor.datatype == BYTES]
    of_strings = 2 * received_bytes + BYTES_ELEMENT_BYTES * sum(strings) if strings else 0
    return (JSON_MULTIPLE - 1) * pending.written_bytes + of_strings


def kept_bytes(admitted: ValidatedRequest) -> int:
    """What is kept beside the bytes received once a request is decoded: what shares no memory with them."""
    total = 0
    for array in admitted.inputs.values():
        if array.dtype.hasobject:
            total += BYTES_ELEMENT_BYTES * array.size + sum(map(len, array.reshape(-1)))
        elif array.flags.writeable:  # what was decoded in place is not
            total += array.nbytes
    return total
