"""CRDs in a real API server: rejected fields, defaults, and round trips of example documents."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.builders import a_pipeline, a_pipeline_document, a_plan, a_point_profile, a_profile, a_stage, a_variant
from tests.router.chats import a_chat_pipeline
from tests.router.engines import an_engine_pipeline
from trimtab_kubernetes import Cluster, ClusterError
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.resource import Resource
from trimtab_pipelines.spec import InferencePipeline

EXAMPLES = sorted((Path(__file__).parents[2] / "pipelines").glob("*/p*.yaml"))
Document = dict[str, Any]
Change = Callable[[Document], object]


def in_namespace(document: Document, namespace: str) -> Document:
    placed = copy.deepcopy(document)
    placed["metadata"]["namespace"] = namespace
    return placed


def dumped(resource: BaseModel, namespace: str) -> Document:
    return in_namespace(resource.model_dump(mode="json", by_alias=True, exclude_none=True), namespace)


def chain(*sources: str) -> list[Document]:
    return [a_stage(f"stage-{n}", source) for n, source in enumerate(sources)]


def set_spec(**fields: Any) -> Change:
    return lambda document: document["spec"].update(fields)


def set_stage(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0].update(fields)


def set_variant(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0]["variants"][0].update(fields)


def set_output(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0]["outputs"][0].update(fields)


WRONG: dict[str, tuple[Change, str]] = {
    "minimum above maximum": (set_stage(minReplicas=3, maxReplicas=2), "minReplicas must not be above maxReplicas"),
    "no replica": (set_stage(minReplicas=0), "minReplicas.*greater than or equal to 1"),
    "unknown pin": (set_stage(pin={"variant": "large"}), "pin.variant must be the name of one of the stage's variants"),
    "unknown pinned point": (set_stage(pin={"operatingPoint": "fast"}), "pin.operatingPoint must be"),
    "pinned point of another variant": (
        set_stage(
            variants=[a_variant(), a_variant("large", operatingPoints=[{"name": "fast", "accuracy": 0.9}])],
            pin={"variant": "small", "operatingPoint": "fast"},
        ),
        "pin.operatingPoint must be .* of pin.variant",
    ),
    "default pinned where points are named": (
        set_stage(
            variants=[a_variant(operatingPoints=[{"name": "fast", "accuracy": 0.9}])], pin={"operatingPoint": "default"}
        ),
        "pin.operatingPoint must be",
    ),
    "pinned batch too large": (set_stage(pin={"batchSize": 65}), "pin.batchSize must not exceed"),
    "pinned batch too large for the point": (
        set_stage(
            variants=[
                a_variant("large", maxBatchSize=64),
                a_variant(maxBatchSize=8, operatingPoints=[{"name": "fast", "accuracy": 0.9}]),
            ],
            pin={"operatingPoint": "fast", "batchSize": 16},
        ),
        "pin.batchSize must not exceed",
    ),
    "too many replicas pinned": (set_stage(pin={"replicas": 65}), "pin.replicas must lie between"),
    "too few replicas pinned": (set_stage(minReplicas=2, pin={"replicas": 1}), "pin.replicas must lie between"),
    "variant twice": (set_stage(variants=[a_variant(), a_variant()]), "duplicate entries for key .name=.small"),
    "stage twice": (set_spec(stages=[a_stage(), a_stage()]), "duplicate entries for key .name=.first"),
    "a reserved stage name": (set_stage(name="request"), "the name request is reserved"),
    "own output": (set_spec(stages=[*chain("request.inputs.x", "stage-1.outputs.y")]), "must not read its own outputs"),
    "no such stage": (
        set_spec(stages=chain("request.inputs.x", "other.outputs.y")),
        "of an existing tensor or stage",
    ),
    "no such input": (set_spec(stages=chain("request.inputs.z")), "of an existing tensor or stage"),
    "no such output": (
        set_spec(outputs=[{"name": "y", "from": "first.outputs.z"}]),
        "each output's from must be STAGE.outputs.TENSOR",
    ),
    "malformed reference": (set_spec(outputs=[{"name": "y", "from": "first.y"}]), "outputs.*from.*should match"),
    "two stages in a circle": (
        set_spec(
            stages=chain("request.inputs.x", "stage-2.outputs.y", "stage-1.outputs.y"),
            outputs=[{"name": "y", "from": "stage-2.outputs.y"}],
        ),
        "two stages read from each other",
    ),
    "all stages in a circle": (
        set_spec(
            stages=chain("stage-2.outputs.y", "stage-0.outputs.y", "stage-1.outputs.y"),
            outputs=[{"name": "y", "from": "stage-2.outputs.y"}],
        ),
        "at least one stage must read from the request only",
    ),
    "count that is not there": (set_output(countedBy="n"), "countedBy must name an INT32 or INT64 output"),
    "least cost of what": (set_spec(objective={"goal": "MinCost"}), "MinCost needs accuracyFloor, for instance 0.9"),
    "family and container": (
        set_variant(container={"image": "triton"}),
        "give either a family or a container, not both",
    ),
    "neither family nor container": (set_variant(family=""), "give family and storageUri, or a container"),
    "weights from nowhere": (set_variant(storageUri=""), "give family and storageUri, or a container"),
    "task from nowhere": (set_variant(tasks=[{"name": "new"}]), "storageUri or removed: true"),
    "container without image": (set_variant(family="", container={"image": ""}), "image.*at least 1 chars"),
    "accuracy in percent": (set_variant(accuracy=93.1), "accuracy.*less than or equal to 1"),
    "accuracy beside its interval": (
        set_variant(accuracyEvidence={"low": 0.95, "high": 0.99}),
        "accuracy must lie between accuracyEvidence.low and high",
    ),
    "a point's accuracy beside its interval": (
        set_variant(operatingPoints=[{"accuracy": 0.9, "accuracyEvidence": {"high": 0.8}}]),
        "accuracy must lie between accuracyEvidence.low and high",
    ),
    "two spellings of one knob": (
        set_variant(operatingPoints=[{"accuracy": 0.9, "tokenDelta": -8, "merging": {"schedule": [4]}}]),
        "tokenDelta is a shorthand",
    ),
    "a size of nothing": (
        set_variant(operatingPoints=[{"accuracy": 0.9, "inputSize": {}}]),
        "give resolution, patch, or both",
    ),
    "no core": (set_variant(resources={"cpu": "0"}), "resources.cpu.*should match"),
    "no core, as a number": (set_variant(resources={"cpu": 0}), "resources.cpu.*greater than or equal to 1"),
    "unknown unit": (set_variant(resources={"memory": "256MB"}), "resources.memory.*should match"),
    "no budget": (set_spec(budget={"cores": "0m"}), "cores must be above 0, for instance 2 or 500m"),
    "no time": (set_spec(slo={"latency": "0ms"}), "latency must be above 0, for instance 250ms"),
    "time without unit": (set_spec(slo={"latency": "250"}), "slo.latency.*should match"),
    "a number for a time": (set_spec(slo={"latency": 400}), "slo.latency: expected string"),
    "too short an interval": (set_spec(adaptation={"interval": "999ms"}), "interval must be 1s or more"),
    "a reserved pipeline name": (
        lambda document: document["metadata"].update(name="x-advisory"),
        "metadata.name must not end in -advisory",
    ),
    "a first token after the last": (
        set_spec(slo={"latency": "500ms", "timeToFirstToken": "1s"}),
        "timeToFirstToken must not be longer than latency",
    ),
    "token SLO without a generation stage": (
        set_spec(slo={"latency": "1s", "timePerOutputToken": "50ms"}),
        "slo.timeToFirstToken and slo.timePerOutputToken require",
    ),
    "chat without a generation stage": (
        set_spec(chat={"images": {"maxPerRequest": 4}}),
        "chat requires an input messages BYTES",
    ),
    "a store at no port": (
        set_spec(chat={"images": {"trustedPrefixes": ["http://minio.storage:65536/"]}}),
        "images.trustedPrefixes.*should match",
    ),
    "a host with a scheme": (
        set_spec(chat={"images": {"allowedDomains": ["https://a.example"]}}),
        "images.allowedDomains.*should match",
    ),
    "encoder with other outputs": (set_stage(role="Encode"), "role Encode requires the only output references"),
    "generation with other outputs": (set_stage(role="Generate"), "role Generate requires the outputs text BYTES"),
    "OpenAI container without a generation stage": (
        set_variant(family="", storageUri="", container={"image": "i", "protocol": "OpenAI", "readyPath": "/health"}),
        "a container of protocol OpenAI requires role Generate",
    ),
    "OpenAI container without readyPath": (
        set_variant(family="", storageUri="", container={"image": "i", "protocol": "OpenAI"}),
        "requires a readyPath, for instance /health",
    ),
    "confidence": (set_spec(slo={"latency": "1s", "quantile": 1}), "slo.quantile.*less than 1"),
    "unknown mode": (set_spec(mode="Manual"), 'mode: Unsupported value: "Manual": supported values'),
    "no stages": (set_spec(stages=[]), "stages.*at least 1 items"),
    "misspelt field": (set_spec(buget={}), "buget: field not declared in schema"),
    "long name": (
        lambda document: document["metadata"].update(name="p" * 64),
        "metadata.name: Too long: may not be more than 63",
    ),
    "dotted name": (lambda document: document["metadata"].update(name="my.pipeline"), "metadata.name.*should match"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_invalid_document_is_rejected_with_a_message(cluster: Cluster, case: str):
    change, message = WRONG[case]
    document = in_namespace(a_pipeline_document(), "default")
    change(document)

    with pytest.raises(ClusterError, match=f"(?s){message}"):
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


async def test_openai_container_round_trips(cluster: Cluster, namespace: str):
    pipeline = an_engine_pipeline()

    assert await returned(cluster, pipeline, namespace) == pipeline.spec


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
    document = dumped(resource, namespace)
    await cluster.apply(document, manager="tests")
    found = await cluster.get(document["kind"], namespace, document["metadata"]["name"])
    assert found is not None
    assert_contains(found["spec"], json.loads(json.dumps(document["spec"])), "spec")
    return type(resource).model_validate(found).spec


def assert_contains(found: Any, written: Any, path: str) -> None:
    if isinstance(written, dict):
        for key, value in written.items():
            assert key in found, f"{path}.{key} was dropped"
            assert_contains(found[key], value, f"{path}.{key}")
    elif isinstance(written, list):
        assert len(found) == len(written), path
        for n, (one, other) in enumerate(zip(found, written, strict=True)):
            assert_contains(one, other, f"{path}[{n}]")
    else:
        assert found == written, path


async def test_server_defaults_equal_model_defaults(cluster: Cluster, namespace: str):
    document = in_namespace(
        a_pipeline_document(budget={"cores": 8}, router={"resources": {"memory": "64Mi"}}), namespace
    )

    stored = await cluster.apply(document, manager="tests")

    assert stored["spec"]["adaptation"]["interval"] == "10s"
    assert stored["spec"]["stages"][0]["variants"][0]["resources"] == {"cpu": "1", "memory": "512Mi", "gpu": 0}
    assert stored["spec"]["router"]["resources"]["cpu"] == "1"
    assert parsed(InferencePipeline, stored) == parsed(InferencePipeline, document)


def parsed(kind: type[Resource], document: Document) -> Any:
    return kind.model_validate(document).model_dump(include={"spec"})
