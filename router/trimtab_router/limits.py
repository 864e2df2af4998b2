"""`Limits`: bounds on memory and time of a router process, and their derivation from the memory of router and Envoy."""

from dataclasses import dataclass, replace
from typing import Self

from trimtab_pipelines.edge_settings import ClientLimits, EdgeSettings
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.tensors import SLOW_VALUES_BYTES
from trimtab_router.scheduling.queue_admission import GRACE_SECONDS

MEBIBYTE = 2**20
SMALL_BYTES = 256 * 1024
LARGE_SHARE = 0.75  # of all bytes, for requests beyond `SMALL_BYTES`; the rest is reserved for small ones
JSON_MULTIPLE = 16  # memory of parsed JSON by its text: "1," becomes an object of 28 bytes and a pointer
HEAP_SHARE = 0.7  # Share of Envoy's memory limit that its heap may use. The rest is for its program and its allocator.
PROGRAM_BYTES = 96 * MEBIBYTE  # memory of a router without requests
COPIES = 6  # most copies of a request in memory while it is received, decoded, forwarded and answered
PAYLOADS_IN_HEAP = 4  # number of the largest requests that Envoy can buffer before it resets streams
MAX_PAYLOAD_BYTES = 64 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router process."""

    max_bytes_in_flight: int = 256 * MEBIBYTE
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_json_bytes: int = MEBIBYTE
    """Of JSON and typed gRPC contents, which need many times their size parsed."""
    max_response_bytes: int = 0
    """If the stage leaves the size open; 0: twice the largest payload."""
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
        return replace(self, max_client_requests=clients.concurrency, max_client_bytes=clients.in_flight)

    @property
    def response_bytes(self) -> int:
        return self.max_response_bytes or 2 * self.max_payload_bytes

    @property
    def json_bytes(self) -> int:
        """Maximum bytes of JSON, considering the memory that parsing needs."""
        affordable = max(self.max_bytes_in_flight // JSON_MULTIPLE, SLOW_VALUES_BYTES)
        return min(self.max_json_bytes, self.max_payload_bytes, affordable)


def heap_bytes(settings: EdgeSettings) -> int:
    return int(HEAP_SHARE * settings.memory)


def in_flight_bytes(pipeline: InferencePipeline, settings: EdgeSettings) -> int:
    """Bytes that all requests in flight may hold in the router. TLS to replicas needs one more copy."""
    copies = COPIES + (settings.replicas is not None)
    return max((pipeline.spec.router.resources.memory - PROGRAM_BYTES) // copies, 4 * MEBIBYTE)


def payload_bytes(pipeline: InferencePipeline, settings: EdgeSettings) -> int:
    """Size of the largest request that router and Envoy can hold."""
    return min(
        int(LARGE_SHARE * in_flight_bytes(pipeline, settings)) - SMALL_BYTES,
        heap_bytes(settings) // PAYLOADS_IN_HEAP,
        MAX_PAYLOAD_BYTES,
    )
