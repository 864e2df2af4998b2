"""CRDs and JSON schemas: columns exist in the models; a real API server rejects, defaults and round trips documents."""

import copy
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.builders import (
    a_body,
    a_pipeline,
    a_pipeline_document,
    a_plan,
    a_point_profile,
    a_profile,
    a_stage,
    a_variant,
)
from tests.pipelines.invalid_documents import INVALID, Invalid
from tests.router.chats import a_chat_pipeline
from tests.router.engines import an_engine_pipeline
from trimtab_kubernetes import Cluster, ClusterError
from trimtab_operator.reconciliation.object_diff import difference
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.rendering import crd, differing, schema, write_or_check
from trimtab_pipelines.rendering.crd_schema import structural
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.status import ConditionType, InferencePipelineStatus

CONDITION_PATH = re.compile(r'^\.status\.conditions\[\?\(@\.type=="(\w+)"\)\]\.(\w+)$')
CONDITIONS = {"InferencePipeline": set(typing.get_args(ConditionType)), "PipelinePlan": {"Applied"}}
PREDEFINED = {".metadata.creationTimestamp"}


def columns() -> list[Any]:
    return [
        pytest.param(definition, column, id=f"{definition.short_name}-{column.name}")
        for definition in crd.DEFINITIONS
        for column in definition.columns
    ]


def field_of(model: type[BaseModel] | None, path: list[str]) -> dict[str, Any]:
    assert model is not None
    found = structural(model)
    for name in path:
        found = found["properties"][name]
    return found


def test_every_document_has_a_schema_in_camel_case():
    assert sorted(schema.render()) == [
        f"{kind}.schema.json" for kind in ("inferencepipeline", "modelprofile", "pipelineplan")
    ]
    assert '"storageUri"' in schema.render()["inferencepipeline.schema.json"]


def test_changed_and_surplus_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert write_or_check([str(tmp_path)], crd.files(), crd.SUFFIX) == 0
    (tmp_path / "pipelineplans.yaml").write_text("{}")
    (tmp_path / "forgotten.yaml").write_text("{}")

    assert differing(tmp_path, crd.files(), crd.SUFFIX) == ["pipelineplans.yaml", "forgotten.yaml"]
    assert write_or_check([str(tmp_path), "--check"], crd.files(), crd.SUFFIX) == 1
    assert "pipelineplans.yaml, forgotten.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(("definition", "column"), columns())
def test_each_column_shows_an_existing_field(definition: crd.Definition, column: crd.Column):
    condition = CONDITION_PATH.match(column.path)
    if condition is not None:
        kind, part = condition.groups()
        assert kind in CONDITIONS[definition.resource.__name__]
        assert part in {"status", "reason", "message"}
    elif column.path not in PREDEFINED:
        owner, *path = column.path.strip(".").split(".")
        field = field_of(definition.spec if owner == "spec" else definition.status, path)
        assert field["type"] == column.type


def test_lists_of_named_items_are_keyed_by_name():
    stages = structural(InferencePipelineSpec)["properties"]["stages"]
    stage = stages["items"]["properties"]
    lists = [stages, stage["variants"], stage["inputs"], stage["outputs"]]
    lists.append(stage["variants"]["items"]["properties"]["operatingPoints"])

    assert [found["x-kubernetes-list-map-keys"] for found in lists] == [["name"]] * 5


def test_status_schema_has_no_defaults():
    assert "default" not in str(structural(InferencePipelineStatus, defaults=False)["properties"]["stages"]["items"])


def test_every_spec_field_has_a_description_or_enum():
    """A field without description must be an enumeration, a boolean, a name, or a part that describes itself."""
    bare = [path for path, field in walk(structural(InferencePipelineSpec)) if not is_described(field)]

    assert bare == []


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name, field in schema.get("properties", {}).items():
        found.append((f"{path}.{name}", field))
        found += walk(field, f"{path}.{name}")
        found += walk(field.get("items", {}), f"{path}.{name}[]")
    return found


def is_described(field: dict[str, Any]) -> bool:
    bounded = {"enum", "pattern", "minimum", "maximum", "minItems", "items", "additionalProperties", "description"}
    return bool(bounded & field.keys()) or field["type"] in {"string", "boolean"}


@pytest.mark.parametrize("field", ["objective", "adaptation", "router", "rollout", "queue"])
def test_schema_default_equals_model_default(field: str):
    pipeline = a_pipeline()
    default = structural(InferencePipelineSpec)["properties"][field]["default"]
    document = a_body(pipeline)
    document["spec"][field] = default

    assert type(pipeline).model_validate(document) == pipeline


EXAMPLES = sorted((Path(__file__).parents[2] / "pipelines").glob("*/p*.yaml"))
Document = dict[str, Any]


def in_namespace(document: Document, namespace: str) -> Document:
    placed = copy.deepcopy(document)
    placed["metadata"]["namespace"] = namespace
    return placed


@pytest.mark.parametrize("invalid", INVALID.values(), ids=INVALID)
async def test_invalid_document_is_rejected_with_a_message(cluster: Cluster, invalid: Invalid):
    document = in_namespace(a_pipeline_document(), "default")
    invalid.change(document)

    with pytest.raises(ClusterError, match=f"(?s){invalid.server}"):
        await cluster.apply(document, manager="tests", dry_run=True)


async def test_base_document_is_accepted(cluster: Cluster):
    await cluster.apply(in_namespace(a_pipeline_document(), "default"), manager="tests", dry_run=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=[f"{path.parent.name}-{path.stem}" for path in EXAMPLES])
async def test_examples_round_trip(cluster: Cluster, namespace: str, path: Path):
    pipeline = load_pipeline(path)

    assert await returned(cluster, pipeline, namespace) == pipeline.spec


async def test_full_pipeline_round_trips(cluster: Cluster, namespace: str):
    served = a_variant("served", family="", storageUri="", container={"image": "triton", "env": {"A": "1"}})
    tuned = a_variant(
        parameters={"depth": 3, "wide": True, "rate": 0.5, "kind": "plain"},
        resources={"cpu": 0.25, "memory": "1.5Gi", "gpu": 1},
        nodeSelector={"accelerator": "l4"},
        tolerations=[{"key": "gpu", "operator": "Exists", "tolerationSeconds": 30}],
        operatingPoints=[
            {"accuracy": 0.9, "accuracyEvidence": {"source": "Measured", "samples": 100, "low": 0.83, "high": 0.94}},
            {"name": "merged", "tokenDelta": -8, "accuracy": 0.8},
            {
                "name": "prompted",
                "modalities": ["x"],
                "merging": {"schedule": [16, 8], "rule": "bipartite"},
                "prompts": {"count": 4, "mode": "Accumulate"},
                "precision": "INT8",
                "compiled": "inductor",
                "inputSize": {"resolution": 160, "patch": 16},
                "accuracy": 0.85,
                "accuracyByTask": {"crops": {"value": 0.7, "low": 0.6, "samples": 90, "source": "Measured"}},
            },
        ],
    )
    stage = a_stage(
        variants=[tuned, served], pin={"operatingPoint": "merged"}, minReplicas=2, variantPlacement="Dedicated"
    )
    pipeline = a_pipeline(
        [stage],
        budget={"cores": 2.5, "gpus": 2, "surgeCores": "250m", "pool": "shared"},
        objective={"goal": "MinCost", "accuracyFloor": 0.75, "accuracyBasis": "LowerBound"},
        adaptation={"interval": 2.5, "demandQuantile": 0.9},
        router={"replicas": 2, "resources": {"memory": "64Mi"}},
    )

    assert await returned(cluster, pipeline, namespace) == pipeline.spec


async def test_chat_settings_round_trip(cluster: Cluster, namespace: str):
    images = {
        "maxPerRequest": 4,
        "maxMegapixels": 2.5,
        "maxBytes": "1Mi",
        "allowedDomains": ["a.example"],
        "trustedPrefixes": ["https://s.example/i/"],
    }
    pipeline = a_chat_pipeline(
        chat={"images": images}, slo={"latency": "9s", "timeToFirstToken": "1s", "timePerOutputToken": "50ms"}
    )

    assert await returned(cluster, pipeline, namespace) == pipeline.spec
    served = an_engine_pipeline()
    assert await returned(cluster, served, namespace) == served.spec


async def test_plan_and_profile_round_trip(cluster: Cluster, namespace: str):
    forecast = {"peakRps": 12.75, "observedRps": 0.1, "source": "lstm", "recentError": 0.125}
    explanation = {
        "change": "first ×2",
        "accuracyBasis": "expected values",
        "excludedPoints": ["first: small/worse"],
        "runnerUp": {"stages": {"first": "small ×1"}, "objectiveLoss": 0.5},
    }
    point: dict[str, Any] = {
        "accuracyByTask": {"crops": 0.7},
        "inputs": ["x"],
        "serviceSeconds": {"1": 0.004, "8": 0.0221},
    }
    others: dict[str, Any] = {
        "upgrades": [{"name": "more", "accuracy": 0.95} | point],
        "fallbacks": [{"name": "less", "accuracy": 0.5}],
    }
    written = a_plan(a_pipeline(), cores="500m", **point, **others).model_dump(by_alias=True)
    written["spec"] |= {"forecast": forecast, "explanation": explanation, "createdAt": 1763713108.123456}
    plan = PipelinePlan.model_validate(written)
    profile = a_profile("first", [a_point_profile(cores=0.5)])

    assert await returned(cluster, plan, namespace) == plan.spec
    assert await returned(cluster, profile, namespace) == profile.spec


async def returned(cluster: Cluster, resource: InferencePipeline | PipelinePlan | ModelProfile, namespace: str) -> Any:
    """Store a document, read it, and hold that the server dropped nothing that was written."""
    document = a_body(resource, namespace=namespace)
    await cluster.apply(document, manager="tests")
    found = await cluster.get(document["kind"], namespace, document["metadata"]["name"])
    assert found is not None
    assert difference(found["spec"], document["spec"]) is None
    return type(resource).model_validate(found).spec


async def test_server_defaults_equal_model_defaults(cluster: Cluster, namespace: str):
    document = in_namespace(
        a_pipeline_document(budget={"cores": 8}, router={"resources": {"memory": "64Mi"}}), namespace
    )

    stored = await cluster.apply(document, manager="tests")

    assert stored["spec"]["adaptation"]["interval"] == "10s"
    assert stored["spec"]["stages"][0]["variants"][0]["resources"] == {"cpu": "1", "memory": "512Mi", "gpu": 0}
    assert stored["spec"]["router"]["resources"]["cpu"] == "1"
    assert InferencePipeline.model_validate(stored).spec == InferencePipeline.model_validate(document).spec
