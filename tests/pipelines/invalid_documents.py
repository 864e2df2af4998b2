"""Pipelines that the API server and the model reject, with the message of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.builders import a_stage, a_variant

Change = Callable[[dict[str, Any]], object]
POINTED = a_variant(
    "pointed", maxBatchSize=8, operatingPoints=[{"name": name, "accuracy": 0.9} for name in ("full", "fast")]
)


@dataclass(frozen=True, slots=True)
class Invalid:
    """An invalid change of the smallest pipeline; messages are regular expressions."""

    change: Change
    server: str
    model: str = ""


def chain(*sources: str) -> list[dict[str, Any]]:
    return [a_stage(f"stage-{n}", source) for n, source in enumerate(sources)]


def spec(**fields: Any) -> Change:
    return lambda document: document["spec"].update(fields)


def stage(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0].update(fields)


def variant(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0]["variants"][0].update(fields)


def output(**fields: Any) -> Change:
    return lambda document: document["spec"]["stages"][0]["outputs"][0].update(fields)


def container(**fields: Any) -> Change:
    return variant(family="", storageUri="", container={"image": "i", "protocol": "OpenAI", **fields})


def named(name: str) -> Change:
    return lambda document: document["metadata"].update(name=name)


READ_FROM_CIRCLE = [{"name": "y", "from": "stage-2.outputs.y"}]
NO_POINT = "pin.operatingPoint must be"
NOT_A_POINT = "pin.operatingPoint 'other' is not an operating point of "
INVALID = {
    "minimum above maximum": Invalid(
        stage(minReplicas=3, maxReplicas=2),
        "minReplicas must not be above maxReplicas",
        "minReplicas 3 is above maxReplicas 2",
    ),
    "no replica": Invalid(stage(minReplicas=0), "minReplicas.*greater than or equal to 1"),
    "unknown pin": Invalid(
        stage(pin={"variant": "huge"}),
        "pin.variant must be the name of one of the stage's variants",
        "pin.variant 'huge' is not one of its variants: small",
    ),
    "unknown pinned point": Invalid(
        stage(pin={"operatingPoint": "other"}), NO_POINT, NOT_A_POINT + "its variants: default"
    ),
    "pinned point of another variant": Invalid(
        stage(variants=[POINTED, a_variant()], pin={"variant": "small", "operatingPoint": "other"}),
        "pin.operatingPoint must be .* of pin.variant",
        NOT_A_POINT + "variant small: default",
    ),
    "default pinned where points are named": Invalid(
        stage(variants=[POINTED], pin={"operatingPoint": "default"}), NO_POINT, "its variants: full, fast"
    ),
    "pinned batch too large": Invalid(
        stage(pin={"batchSize": 65}), "pin.batchSize must not exceed", "pin.batchSize 65 is above"
    ),
    "pinned batch too large for the point": Invalid(
        stage(variants=[POINTED, a_variant(maxBatchSize=64)], pin={"operatingPoint": "fast", "batchSize": 16}),
        "pin.batchSize must not exceed",
        "pin.batchSize 16 is above",
    ),
    "too many replicas pinned": Invalid(
        stage(pin={"replicas": 65}),
        "pin.replicas must lie between",
        "pin.replicas 65 must be between minReplicas 1 and maxReplicas 64",
    ),
    "too few replicas pinned": Invalid(
        stage(minReplicas=2, pin={"replicas": 1}),
        "pin.replicas must lie between",
        "pin.replicas 1 must be between minReplicas 2",
    ),
    "variant twice": Invalid(
        stage(variants=[a_variant(), a_variant()]), "duplicate entries for key .name=.small", "duplicate name 'small'"
    ),
    "stage twice": Invalid(
        spec(stages=[a_stage(), a_stage()]), "duplicate entries for key .name=.first", "duplicate name 'first'"
    ),
    "a reserved stage name": Invalid(
        stage(name="request"), "the name request is reserved", "the name 'request' is reserved"
    ),
    "own output": Invalid(
        spec(stages=chain("request.inputs.x", "stage-1.outputs.y")),
        "must not read its own outputs",
        "stage-1 → stage-1 is a cycle",
    ),
    "no such stage": Invalid(
        spec(stages=chain("request.inputs.x", "other.outputs.y")), "of an existing tensor or stage", "is unknown"
    ),
    "no such input": Invalid(spec(stages=chain("request.inputs.z")), "of an existing tensor or stage", "is unknown"),
    "no such output": Invalid(
        spec(outputs=[{"name": "y", "from": "stage-0.outputs.z"}]),
        "each output's from must be STAGE.outputs.TENSOR",
        "is unknown",
    ),
    "malformed reference": Invalid(spec(outputs=[{"name": "y", "from": "first.y"}]), "outputs.*from.*should match"),
    "two stages in a circle": Invalid(
        spec(stages=chain("request.inputs.x", "stage-2.outputs.y", "stage-1.outputs.y"), outputs=READ_FROM_CIRCLE),
        "two stages read from each other",
        "is a cycle",
    ),
    "all stages in a circle": Invalid(
        spec(stages=chain("stage-2.outputs.y", "stage-0.outputs.y", "stage-1.outputs.y"), outputs=READ_FROM_CIRCLE),
        "at least one stage must read from the request only",
        "is a cycle",
    ),
    "count that is not there": Invalid(
        output(countedBy="n"), "countedBy must name an INT32 or INT64 output", "countedBy 'n' is not one of"
    ),
    "least cost of what": Invalid(
        spec(objective={"goal": "MinCost"}), "MinCost needs accuracyFloor, for instance 0.9", "accuracyFloor"
    ),
    "family and container": Invalid(
        variant(container={"image": "triton"}), "give one of family, implementation and container"
    ),
    "family and implementation": Invalid(
        variant(implementation="acme.Model"), "give one of family, implementation and container"
    ),
    "neither family nor container": Invalid(variant(family=""), "give storageUri and family or implementation"),
    "weights from nowhere": Invalid(variant(storageUri=""), "give storageUri and family or implementation"),
    "task from nowhere": Invalid(
        variant(tasks=[{"name": "new"}]), "storageUri or removed: true", "storageUri or removed: true"
    ),
    "accuracy in percent": Invalid(
        variant(accuracy=93.1), "accuracy.*less than or equal to 1", "variants.0.accuracy.*less than or equal to 1"
    ),
    "accuracy beside its interval": Invalid(
        variant(accuracyEvidence={"low": 0.95, "high": 0.99}),
        "accuracy must lie between accuracyEvidence.low and high",
        "outside its interval",
    ),
    "a point's accuracy beside its interval": Invalid(
        variant(operatingPoints=[{"accuracy": 0.9, "accuracyEvidence": {"high": 0.8}}]),
        "accuracy must lie between accuracyEvidence.low and high",
        "outside its interval",
    ),
    "two spellings of one knob": Invalid(
        variant(operatingPoints=[{"accuracy": 0.9, "tokenDelta": -8, "merging": {"schedule": [4]}}]),
        "tokenDelta is a shorthand",
        "tokenDelta",
    ),
    "a size of nothing": Invalid(
        variant(operatingPoints=[{"accuracy": 0.9, "inputSize": {}}]),
        "give resolution, patch, or both",
        "give resolution, patch, or both",
    ),
    "no core": Invalid(variant(resources={"cpu": "0"}), "resources.cpu.*should match"),
    "no core, as a number": Invalid(variant(resources={"cpu": 0}), "resources.cpu.*greater than or equal to 1"),
    "no budget": Invalid(spec(budget={"cores": "0m"}), "cores must be above 0, for instance 2 or 500m"),
    "no time": Invalid(spec(slo={"latency": "0ms"}), "latency must be above 0, for instance 250ms"),
    "time without unit": Invalid(
        spec(slo={"latency": "250"}), "slo.latency.*should match", "spec.slo.latency: .*250.* 250ms"
    ),
    "too short an interval": Invalid(
        spec(adaptation={"interval": "999ms"}),
        "interval must be 1s or more",
        "spec.adaptation.interval: .*greater than or equal to 1",
    ),
    "a reserved pipeline name": Invalid(
        named("x-advisory"),
        "metadata.name must not end in -advisory",
        "metadata.name 'x-advisory' must not end in -advisory",
    ),
    "a first token after the last": Invalid(
        spec(slo={"latency": "500ms", "timeToFirstToken": "1s"}), "timeToFirstToken must not be longer than latency"
    ),
    "token SLO without a generation stage": Invalid(
        spec(slo={"latency": "1s", "timePerOutputToken": "50ms"}),
        "slo.timeToFirstToken and slo.timePerOutputToken require",
    ),
    "chat without a generation stage": Invalid(
        spec(chat={"images": {"maxPerRequest": 4}}), "chat requires an input messages BYTES"
    ),
    "a store at no port": Invalid(
        spec(chat={"images": {"trustedPrefixes": ["http://minio.storage:65536/"]}}),
        "images.trustedPrefixes.*should match",
    ),
    "a host with a scheme": Invalid(
        spec(chat={"images": {"allowedDomains": ["https://a.example"]}}), "images.allowedDomains.*should match"
    ),
    "encoder with other outputs": Invalid(
        stage(role="Encode"), "role Encode requires the only output references", "only output"
    ),
    "generation with other outputs": Invalid(stage(role="Generate"), "role Generate requires the outputs text BYTES"),
    "OpenAI container without a generation stage": Invalid(
        container(readyPath="/health"),
        "a container of protocol OpenAI requires role Generate",
        "requires role Generate",
    ),
    "OpenAI container without readyPath": Invalid(container(), "requires a readyPath, for instance /health"),
    "confidence": Invalid(spec(slo={"latency": "1s", "quantile": 1}), "slo.quantile.*less than 1"),
    "unknown mode": Invalid(
        spec(mode="Manual"), 'mode: Unsupported value: "Manual": supported values', "spec.mode: Input should be"
    ),
    "no stages": Invalid(spec(stages=[]), "stages.*at least 1 items", "spec.stages: .*at least 1"),
    "misspelt field": Invalid(spec(buget={}), "buget: field not declared in schema", "spec.buget: unknown field"),
    "long name": Invalid(named("p" * 64), "metadata.name: Too long: may not be more than 63"),
    "dotted name": Invalid(named("my.pipeline"), "metadata.name.*should match"),
}
