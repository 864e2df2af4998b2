"""Documents between the versions of an upgrade: goldens of each version, read and rendered by this one.

Goldens are not updated when a document changes: the version that wrote them runs beside this one. A version that adds
fields adds a folder of its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from tests.operator_.conftest import SETTINGS
from trimtab_adapter.observation import read_state
from trimtab_operator.manifests.replica_groups import replica_group
from trimtab_operator.manifests.routers import plan_document, router_pipeline
from trimtab_operator.reconciliation.object_diff import difference
from trimtab_pipelines.documents import DocumentError, accept_plan, dump_yaml, parse, parse_plan
from trimtab_pipelines.model_spec import ModelSpec, join_variable
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline

GOLDEN = Path(__file__).parents[1] / "data" / "versions"
PIPELINE, PLAN, MODELS, STATE = "pipeline.yaml", "plan.json", "models.json", "state.json"
LATER = {"knob": 1}
"""A field of a later version."""


def rendered(pipeline: InferencePipeline, plan: PipelinePlan, state: RouterState) -> dict[str, Any]:
    """What components of this version write for others, as parsed JSON or YAML."""
    stage = pipeline.spec.stage("answer")
    pods = replica_group(pipeline, stage, replica_groups(stage)[0], SETTINGS, replicas=1, surge=False)
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    models = join_variable("TRIMTAB_MODELS", {one["name"]: one["value"] for one in container["env"]})
    return {
        PIPELINE: yaml.safe_load(dump_yaml(router_pipeline(pipeline))),
        PLAN: json.loads(json.dumps(plan_document(plan))),
        MODELS: json.loads(models),
        STATE: json.loads(state.model_dump_json()),
    }


@pytest.fixture(scope="module", params=sorted(path.name for path in GOLDEN.iterdir()))
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The documents of one version."""
    return {path.name: yaml.safe_load(path.read_text()) for path in (GOLDEN / request.param).iterdir()}


def read_all(golden: dict[str, Any]) -> tuple[InferencePipeline, PipelinePlan, RouterState]:
    pipeline = parse(InferencePipeline, golden[PIPELINE], PIPELINE)
    plan = accept_plan(parse_plan(golden[PLAN], PLAN), pipeline)
    return pipeline, plan, RouterState.model_validate_json(json.dumps(golden[STATE]))


def test_this_version_reads_the_documents_of_each(golden):
    _, plan, state = read_all(golden)
    observed = read_state(golden[STATE])
    (model,) = TypeAdapter(list[ModelSpec]).validate_json(json.dumps(golden[MODELS]))

    assert (plan.spec.generation, plan.spec.stage("answer").replicas) == (7, 1)
    assert state.plan_generation == 7
    assert (observed.rows_per_request, observed.prompt_tokens) == ({"answer": 1.0}, {"answer": 41.0})
    assert (model.name, model.max_batch_size) == ("decoder-only", 8)


def test_each_version_reads_the_documents_of_this_one(golden):
    """Readers of pipelines and models refuse fields that they do not know; those of plans and states ignore them."""
    written = rendered(*read_all(golden))

    for name in (PIPELINE, MODELS):
        assert written[name] == golden[name]
    for name in (PLAN, STATE):
        assert difference(written[name], golden[name]) is None


MAPS = ("metadata", "accuracyByTask", "serviceSeconds", "prefillSeconds", "stages")


def objects(document: Any, within: str = "") -> Iterator[dict[str, Any]]:
    """Every object of a plan, except maps with keys of their own."""
    if isinstance(document, list):
        for item in document:
            yield from objects(item)
    elif isinstance(document, dict) and within not in MAPS:
        yield document
        for name, value in document.items():
            yield from objects(value, name)


def test_fields_of_a_later_plan_or_state_are_ignored(golden):
    _, plan, state = read_all(golden)
    later_plan, later_state = json.loads(json.dumps(golden[PLAN])), json.loads(json.dumps(golden[STATE]))
    changed = [*objects(later_plan), later_state, later_state["served"], later_state["stages"]["answer"]]
    for each in changed:
        each.update(LATER)

    assert len(changed) > 8
    assert parse_plan(later_plan, PLAN) == plan
    assert RouterState.model_validate_json(json.dumps(later_state)) == state
    assert read_state(later_state) == read_state(golden[STATE])


def test_field_of_a_later_pipeline_is_refused_by_name(golden):
    """A user wrote it: ignored it would promise what this version does not do."""
    later = golden[PIPELINE] | {"spec": golden[PIPELINE]["spec"] | LATER}
    with pytest.raises(DocumentError, match=r"spec\.knob: unknown field"):
        parse(InferencePipeline, later, PIPELINE)


def test_fields_that_an_earlier_version_lacks_have_defaults(golden):
    pipeline, *_ = read_all(golden)
    stage = {"name": "answer", "variant": "decoder-only", "batchSize": 1, "replicas": 1, "accuracy": 0.5}
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": 0.0, "stages": [stage, stage | {"name": "encode"}]}
    plan = accept_plan(parse_plan({"metadata": {"name": pipeline.name}, "spec": spec}, PLAN), pipeline)

    assert plan.spec.stage("answer").operating_point == "default"
    assert read_state({"stages": {"answer": {}}}) == read_state({"stages": {}})
