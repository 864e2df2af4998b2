"""Fields that documents have by default. An earlier version refuses fields that it does not know.

During an upgrade and a rollback, parts of two versions read each other's documents, and definitions of an earlier
version may be in force. A new field is therefore written only where it is used.
"""

from collections.abc import Iterator

import pytest

from tests.builders import a_pipeline, a_point_profile, a_profile
from trimtab_adapter.planning.decide import initial_plan
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.resource import Model

PLAN = """
apiVersion kind metadata.name metadata.namespace spec.createdAt spec.expected.accuracy spec.expected.cores
spec.expected.gpus spec.expected.latencySeconds spec.expected.objective spec.explanation.accuracyBasis
spec.explanation.bindingConstraint spec.explanation.change spec.explanation.gap spec.explanation.solveSeconds
spec.explanation.solver spec.feasible spec.forecast.observedRps spec.forecast.peakRps spec.forecast.reason
spec.forecast.source spec.generation spec.pipeline spec.plannedFraction spec.reason spec.stages.accuracy
spec.stages.batchSize spec.stages.cores spec.stages.fallbacks spec.stages.latencySeconds spec.stages.name
spec.stages.operatingPoint spec.stages.replicas spec.stages.serviceSeconds spec.stages.throughputRps spec.stages.variant
"""
ENDPOINTS = """
generation stages.first.address stages.first.draining stages.first.name stages.first.protocol stages.first.variants
"""


def paths(value: object, prefix: str = "") -> Iterator[str]:
    """Paths of all fields with a value; elements of a list share a path, and so do those of a mapping of numbers."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths(item, prefix if name.isdigit() else f"{prefix}.{name}".lstrip("."))
    elif isinstance(value, list) and value:
        for item in value:
            yield from paths(item, prefix)
    else:
        yield prefix


def default_plan() -> Model:
    pipeline = a_pipeline(1)
    (stage,) = pipeline.spec.stages
    return initial_plan(pipeline, {stage.name: a_profile(stage.name, [a_point_profile(stage.variants[0].name)])})


def default_endpoints() -> Model:
    return Endpoints(stages={"first": (Endpoint(name="first-0", address="127.0.0.1:80", variants=("small",)),)})


@pytest.mark.parametrize(("document", "fields"), [(default_plan(), PLAN), (default_endpoints(), ENDPOINTS)])
def test_no_new_field_is_written_by_default(document: Model, fields: str) -> None:
    written = document.model_dump(mode="json", by_alias=True, exclude_none=True)

    assert set(paths(written)) <= set(fields.split())
