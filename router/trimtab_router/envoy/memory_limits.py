"""Memory limits of a router and its Envoy, derived from the memory they are given."""

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.admission.memory_budget import LARGE_SHARE, SMALL_BYTES

MEBIBYTE = 2**20
HEAP_SHARE = 0.7
"""Share of Envoy's memory limit that its heap may use. The rest is for its program and its allocator."""
PROGRAM_BYTES = 96 * MEBIBYTE
"""Memory of a router without requests."""
COPIES = 6
"""Memory of a request at worst, as a multiple of its size, while it is received, decoded, forwarded and answered."""
PAYLOADS_IN_HEAP = 4
"""Number of the largest requests that Envoy can buffer before it resets streams."""
MAX_PAYLOAD_BYTES = 64 * MEBIBYTE


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
