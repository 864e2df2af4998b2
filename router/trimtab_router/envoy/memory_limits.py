"""How much a router and its door may hold, by the memory they are given: the same on a laptop and in a pod. Pure."""

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.admission.memory_budget import LARGE_SHARE, SMALL_BYTES

MEBIBYTE = 2**20
HEAP_SHARE = 0.7
"""Of the door's memory limit: the heap Envoy may grow to. The rest is its program and what its allocator keeps."""
PROGRAM_BYTES = 96 * MEBIBYTE
"""Of a router's memory, what it takes without any request."""
COPIES = 6
"""How many times its size a request costs the router at worst, while it is received, decoded, sent on and answered."""
PAYLOADS_IN_HEAP = 4
"""How many of the largest requests Envoy can hold at once before it begins to cut callers."""
MOST_PAYLOAD_BYTES = 64 * MEBIBYTE


def heap_bytes(settings: EdgeSettings) -> int:
    """What Envoy may allocate."""
    return int(HEAP_SHARE * settings.memory)


def in_flight_bytes(pipeline: InferencePipeline, settings: EdgeSettings) -> int:
    """What all requests under way may hold of the router's memory; TLS to replicas costs a copy more, encrypted."""
    copies = COPIES + (settings.replicas is not None)
    return max((pipeline.spec.router.resources.memory - PROGRAM_BYTES) // copies, 4 * MEBIBYTE)


def payload_bytes(pipeline: InferencePipeline, settings: EdgeSettings) -> int:
    """The largest request that router and door can hold within their limits."""
    return min(
        int(LARGE_SHARE * in_flight_bytes(pipeline, settings)) - SMALL_BYTES,
        heap_bytes(settings) // PAYLOADS_IN_HEAP,
        MOST_PAYLOAD_BYTES,
    )
