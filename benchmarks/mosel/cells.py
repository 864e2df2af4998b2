"""One cell of the evaluation: a model under the load, times a factor, by one policy, in the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

import benchmarks.papers.policies  # noqa: F401 - registers the baselines
from benchmarks.mosel import load
from benchmarks.mosel.models import FULL_BATCH, MODELS, Model
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import LatencyFit, Measurement, ModelProfile, PointProfile
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies import POLICIES, modality_mix
from trimtab_router.scheduling.policies.interface import Policy

SLO_SECONDS = 1.0
"""The paper does not print its latency SLOs; its models are loaded by what they do within one second."""
MOST_QUEUED_ROWS = 100_000
"""Nobody is turned away at the door: what is too much is the policy's to drop."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.1, 0.2, 0.35, 0.5, 0.7)
OURS, ONCE, WHOLE, FREE = "ModalityMix", "ours, one look", "ours, one look, whole jobs", "ours, one look, λ = 0"
RIVALS = ("Mosel", "AllModalities", "Aggressive", "Random")
METHODS = (OURS, ONCE, WHOLE, FREE, *RIVALS)
_ONE_WAY = Policy(partial(modality_mix.decide, splits=False), uses_fallbacks=True, mixes_points=True)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """How the load goes, [S]: 0 … 1, one value a second."""

    shape: NDArray[np.float64]

    @property
    def seconds(self) -> int:
        """How long it goes."""
        return int(self.shape.size)


@dataclass(frozen=True, slots=True)
class Cell:
    """What to simulate: the paper's load times `factor`; batches take `misjudged` times what is thought."""

    model: str
    method: str
    factor: float
    seed: int = 1
    misjudged: float = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a cell; times in seconds, shares of all jobs.

    `met`: answered in time and, by expectation, as accurate as asked. `answered_rps`: queries answered in time.
    """

    cell: Cell
    jobs: int
    violations: float
    met: float
    accuracy: float
    answered_rps: float
    mean_seconds: float
    provisional: float
    again: float
    shares: Mapping[str, float]


def measure(source: Source, cell: Cell) -> Measured:
    """Simulate a cell."""
    model = next(model for model in MODELS if model.name == cell.model)
    jobs = load.jobs(source.shape, model.most_rps, cell.seed)
    scenario = _scenario(model, cell, jobs, source.seconds)
    return simulated_measures(
        cell, simulate(scenario), jobs.rows, np.array([wish.accuracy_floor for wish in scenario.options])
    )


def simulated_measures(
    cell: Cell, found: SimulationResult, rows: NDArray[np.int64], floors: NDArray[np.float64], stage: str = "answer"
) -> Measured:
    """What a simulation says of a cell, whose jobs had so many rows and asked for so much accuracy, [N]."""
    in_time, answered = found.outcomes == OK, found.outcomes <= LATE
    by_point, again = found.rows_by_point[stage], found.escalated_rows[stage]
    first = max(sum(by_point.values()) - again, 1)
    return Measured(
        cell=cell,
        jobs=found.outcomes.size,
        violations=found.violations,
        met=float((in_time & (found.accuracy >= floors - 1e-3)).mean()),
        accuracy=found.mean_accuracy,
        answered_rps=float(rows[in_time].sum() / found.duration_seconds),
        mean_seconds=float(found.latency_seconds[answered].mean()) if answered.any() else float("nan"),
        provisional=float(found.unescalated.mean()),
        again=again / first,
        shares={name.upper(): rows / max(sum(by_point.values()), 1) for name, rows in by_point.items()},
    )


def _scenario(model: Model, cell: Cell, jobs: load.Jobs, seconds: int) -> Scenario:
    """The load is made denser by playing it faster, so that the jobs stay the same; so do the true latencies."""
    thought = replace(model, latency={name: one / cell.misjudged for name, one in model.latency.items()})
    pipeline = pipeline_of(model, "ModalityMix" if cell.method in {OURS, ONCE, WHOLE, FREE} else cell.method)
    low, high = min(model.accuracy.values()), max(model.accuracy.values())
    rows_rps = float(jobs.rows.sum()) / seconds * cell.factor
    return Scenario(
        pipeline=pipeline,
        profiles={"answer": profile_of(thought)},
        arrivals_seconds=jobs.at_seconds / cell.factor,
        duration_seconds=seconds / cell.factor,
        plan=plan_of(thought, pipeline, 0.0 if cell.method == FREE else rows_rps, looks=cell.method == OURS),
        environment=Environment(spread=0.0, service_ratios={("answer", "model"): cell.misjudged}),
        policy=_ONE_WAY if cell.method == WHOLE else POLICIES[pipeline.spec.scheduling_policy],
        rows=tuple(jobs.rows.tolist()),
        options=tuple(RequestOptions(accuracy_floor=floor) for floor in jobs.floors(low, high).tolist()),
    )


def pipeline_of(model: Model, policy: str) -> InferencePipeline:
    """One stage that runs the model."""
    inputs = [{"name": sense, "datatype": "FP32", "shape": [1], "optional": True} for sense in model.senses]
    stage = {
        "name": "answer",
        "inputs": [{"name": n, "from": f"request.inputs.{n}", "optional": True} for n in model.senses],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}, {"name": "confidence", "datatype": "FP32"}],
        "confidence": "confidence",
        "variants": [
            {
                "name": "model",
                "family": "echo",
                "storageUri": "random://?seed=1",
                "accuracy": max(model.accuracy.values()),
                "operatingPoints": [
                    {"name": name.lower(), "accuracy": accuracy, "modalities": list(name)}
                    for name, accuracy in model.accuracy.items()
                ],
            }
        ],
    }
    return InferencePipeline.model_validate(
        {
            "metadata": {"name": model.name.lower()},
            "spec": {
                "inputs": inputs,
                "outputs": [{"name": "y", "from": "answer.outputs.y"}],
                "stages": [stage],
                "slo": {"latency": f"{SLO_SECONDS:g}s"},
                "budget": {"cores": "1"},
                "schedulingPolicy": policy,
                "queue": {"maxRows": MOST_QUEUED_ROWS},
            },
        }
    )


def profile_of(model: Model) -> ModelProfile:
    """What the model's subsets were measured to take, by its laws."""
    points = []
    for subset in model.accuracy:
        constant, linear = model.law(subset)
        fit = LatencyFit(quadratic=0, linear=linear, constant=constant, mean_relative_error=0)
        measured = tuple(
            Measurement(
                batch_size=rows,
                latency_seconds_mean=fit.seconds(rows),
                latency_seconds_p50=fit.seconds(rows),
                latency_seconds_p99=fit.seconds(rows),
                throughput_rps=rows / fit.seconds(rows),
                batches=1,
            )
            for rows in BATCHES
        )
        points.append(
            PointProfile(variant="model", operating_point=subset.lower(), cores=1.0, measurements=measured, fit=fit)
        )
    return ModelProfile.model_validate(
        {
            "metadata": {"name": f"{model.name.lower()}-answer"},
            "spec": {
                "pipeline": model.name.lower(),
                "stage": "answer",
                "hardware": {"processor": "the paper's ratios", "nodeCores": 1},
                "points": [point.model_dump() for point in points],
            },
        }
    )


def plan_of(model: Model, pipeline: InferencePipeline, rows_rps: float, *, looks: bool) -> PipelinePlan:
    """One replica that may run every subset; the price of time is that of so many rows a second."""
    points = [
        {
            "name": subset.lower(),
            "accuracy": accuracy,
            "inputs": list(subset),
            "serviceSeconds": {str(rows): model.seconds(subset, rows) for rows in BATCHES},
            "escalations": _looks(model, subset) if looks else [],
        }
        for subset, accuracy in sorted(model.accuracy.items(), key=lambda one: -one[1])
    ]
    best = {key: value for key, value in points[0].items() if key != "name"}
    stage = StagePlan.model_validate(
        {"name": "answer", "variant": "model", "batchSize": FULL_BATCH, "replicas": 1, "fallbacks": points[1:]}
        | {"operatingPoint": points[0]["name"]}
        | best
    )
    spec = {
        "pipeline": pipeline.name,
        "generation": 1,
        "createdAt": 0.0,
        "stages": [with_shadow_price(stage, rows_rps)],
    }
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def _looks(model: Model, subset: str) -> list[dict[str, object]]:
    """Second looks, which the paper has not: the least certain share p is assumed to hold 1 − (1 − p)² of a gain."""
    return [
        {
            "to": wider.lower(),
            "confidenceBelow": share,
            "share": share,
            "accuracy": round(low + (1 - (1 - share) ** 2) * (model.accuracy[wider] - low), 4),
        }
        for low in (model.accuracy[subset],)
        for wider in model.accuracy
        if set(wider) > set(subset) and model.accuracy[wider] > low
        for share in SHARES
    ]


__all__ = [
    "METHODS",
    "OURS",
    "RIVALS",
    "Cell",
    "Measured",
    "SimulationResult",
    "Source",
    "measure",
    "simulated_measures",
]
