"""Names of ours that travel with the protocol's messages, each spelled here alone. Pure."""

from functools import cache
from typing import NamedTuple

# Headers of answers, and of requests that the door passes on.
CLIENT_HEADER = "x-trimtab-client"
"""Who the door says is calling: `key:NAME`, `token:SUBJECT`, or an address. What callers write there is not kept."""
STAGE_HEADER = "x-trimtab-stage"
"""The stage where a request ended without a result."""
REASON_HEADER = "x-trimtab-reason"
"""Why a request was refused, by the door or by the router."""

# Parameters of a batch and of a replica's answer.
OPERATING_POINT = "operating_point"
COMPUTE_SECONDS = "compute_seconds"
WAITED_SECONDS = "waited_seconds"
"""For batches that came to the replica before."""

# Parameters of an answer to a caller.
EXPECTED_ACCURACY = "trimtab.expected_accuracy"
PLAN_GENERATION = "trimtab.plan_generation"


class StageParameters(NamedTuple):
    """The names under which an answer tells how one stage served it."""

    variant: str
    operating_point: str
    batch_size: str
    queue_seconds: str
    service_seconds: str


@cache
def parameters_of(stage: str) -> StageParameters:
    """The names of one stage's parameters."""
    return StageParameters(*(f"trimtab.{stage}.{name}" for name in StageParameters._fields))
