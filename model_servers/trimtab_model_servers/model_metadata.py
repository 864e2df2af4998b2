"""Model metadata of the protocol, and the response parameters."""

from collections.abc import Mapping
from typing import Literal

from trimtab_model_servers.settings import PLATFORM
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import Parameter
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT

Weights = Literal["stored", "random", "none"]
Fact = bool | int | float | str


def metadata_facts(spec: ModelSpec, weights: Weights, family_facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Metadata beyond the protocol's; lists are comma-separated, because parameters have none."""
    return {
        "family": spec.family,
        "weights": weights,
        "accuracy": spec.accuracy,
        "operating_points": ",".join(point.name for point in spec.operating_points),
        "max_batch_size": spec.max_batch_size,
        "threads": spec.threads,
        **family_facts,
    }


def response_parameters(spec: ModelSpec, seconds: float) -> dict[str, Parameter]:
    """Response parameters of a model with a single operating point."""
    return {OPERATING_POINT: spec.operating_points[0].name, COMPUTE_SECONDS: round(seconds, 9)}


def metadata_of(spec: ModelSpec, facts: Mapping[str, Fact]) -> dict[str, object]:
    """The protocol's model metadata, with ``facts`` under `parameters`."""
    return {
        "name": spec.name,
        "versions": [],
        "platform": PLATFORM,
        "inputs": [{"name": i.name, "datatype": i.datatype, "shape": [-1, *i.shape]} for i in spec.inputs],
        "outputs": [{"name": o.name, "datatype": o.datatype, "shape": [-1, *o.shape]} for o in spec.outputs],
        "parameters": dict(facts),
    }
