"""Simulated pipeline of one stage: a model at several operating points, whose batch seconds follow the paper's laws."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.builders import a_measurement
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import LatencyFit, ModelProfile, PointProfile
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_pipelines.spec import InferencePipeline

STAGE, VARIANT = "answer", "model"
FULL_BATCH = 64
BATCHES = (1, 2, 4, 8, 16, 32, FULL_BATCH)
ESCALATED_SHARES = (0.1, 0.2, 0.35, 0.5, 0.7)


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """An operating point: its accuracy, and the seconds of a batch by its rows."""

    name: str
    accuracy: float
    seconds: Callable[[float], float]
    inputs: tuple[str, ...] = ()
    accuracy_by_task: Mapping[str, float] = field(default_factory=dict)


Escalates = Callable[[SimulatedPoint, SimulatedPoint], bool]
"""Whether rows of the first point may be escalated to the second."""


def build_pipeline(name: str, points: Sequence[SimulatedPoint], **spec: Any) -> InferencePipeline:
    """Return the pipeline; `spec` holds fields of its spec beside inputs, outputs and stages."""
    inputs = points[0].inputs and max((point.inputs for point in points), key=len)
    optional = {"optional": True} if inputs else {}
    names = inputs or ("x",)
    stage = {
        "name": STAGE,
        "inputs": [{"name": n, "from": f"request.inputs.{n}"} | optional for n in names],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}, {"name": "confidence", "datatype": "FP32"}],
        "confidence": "confidence",
        "variants": [
            {
                "name": VARIANT,
                "family": "echo",
                "storageUri": "random://?seed=1",
                "accuracy": max(point.accuracy for point in points),
                "maxBatchSize": FULL_BATCH,
                "operatingPoints": [
                    {"name": point.name, "accuracy": point.accuracy}
                    | ({"modalities": list(point.inputs)} if inputs else {})
                    for point in points
                ],
            }
        ],
    }
    document = {
        "inputs": [{"name": n, "datatype": "FP32", "shape": [1]} | optional for n in names],
        "outputs": [{"name": "y", "from": f"{STAGE}.outputs.y"}],
        "stages": [stage],
        "slo": {"latency": "1s"},
        "budget": {"cores": "1"},
    }
    return InferencePipeline.model_validate({"metadata": {"name": name}, "spec": document | spec})


def build_profile(pipeline: str, points: Sequence[SimulatedPoint]) -> ModelProfile:
    """Return the profile that measurements of these points would give."""
    spec = {
        "pipeline": pipeline,
        "stage": STAGE,
        "hardware": {"processor": "the paper's ratios", "nodeCores": 1},
        "points": [_point_profile(point).model_dump() for point in points],
    }
    return ModelProfile.model_validate({"metadata": {"name": f"{pipeline}-{STAGE}"}, "spec": spec})


def _point_profile(point: SimulatedPoint) -> PointProfile:
    constant, linear = point.seconds(0), point.seconds(2) - point.seconds(1)
    measurements = tuple(a_measurement(rows, point.seconds(rows), p99_ratio=1.0) for rows in BATCHES)
    fit = LatencyFit(quadratic=0, linear=linear, constant=constant, mean_relative_error=0)
    return PointProfile(variant=VARIANT, operating_point=point.name, cores=1.0, measurements=measurements, fit=fit)


def build_plan(
    pipeline: InferencePipeline,
    points: Sequence[SimulatedPoint],
    *,
    escalates: Escalates = lambda *_: False,
    priced_rows_rps: float = 0.0,
) -> PipelinePlan:
    """Return the plan of one replica that may run every point; its shadow price is that of `priced_rows_rps`."""
    best_first = sorted(points, key=lambda point: -point.accuracy)
    planned = [
        {
            "name": point.name,
            "accuracy": point.accuracy,
            "accuracyByTask": point.accuracy_by_task,
            "inputs": list(point.inputs),
            "serviceSeconds": {str(rows): point.seconds(rows) for rows in BATCHES},
            "escalations": [
                escalation for to in best_first if escalates(point, to) for escalation in _escalations(point, to)
            ],
        }
        for point in best_first
    ]
    stage = StagePlan.model_validate(
        {"name": STAGE, "variant": VARIANT, "batchSize": FULL_BATCH, "replicas": 1, "fallbacks": planned[1:]}
        | {"operatingPoint": planned[0]["name"]}
        | {key: value for key, value in planned[0].items() if key != "name"}
    )
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": 0.0}
    spec |= {"stages": [with_shadow_price(stage, priced_rows_rps) if priced_rows_rps else stage]}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def _escalations(point: SimulatedPoint, to: SimulatedPoint) -> list[dict[str, object]]:
    """Escalations, which the papers lack: the least confident share p is assumed to hold 1 − (1 − p)² of a gain."""
    return [
        {
            "to": to.name,
            "confidenceBelow": share,
            "share": share,
            "accuracy": round(point.accuracy + (1 - (1 - share) ** 2) * (to.accuracy - point.accuracy), 4),
        }
        for share in ESCALATED_SHARES
    ]
