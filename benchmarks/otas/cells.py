"""One cell of the evaluation: a load, times a factor, by one method, in the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.otas import load
from benchmarks.otas.measured import Cell, Measured, of_simulated
from benchmarks.otas.methods import METHODS, Method
from benchmarks.otas.paper import FULL_BATCH, LOAD_SECONDS, QUERIES, Option
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import LatencyFit, Measurement, ModelProfile, PointProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.request import RequestOptions

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.1, 0.2, 0.35, 0.5, 0.7)
SYNTHETIC, BURSTY = "synthetic", "bursty"
STAGE = "classify"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The rate of the bursty load in each second, [S]; the synthetic one is as long."""

    bursty_rps: NDArray[np.float64]

    @property
    def seconds(self) -> int:
        """How long each load goes."""
        return int(self.bursty_rps.size)


def measure(source: Source, cell: Cell) -> Measured:
    """Simulate a cell."""
    queries = requests_of(source, cell)
    found = simulate(_scenario(METHODS[cell.method], queries, source.seconds))
    utilities = np.array([QUERIES[kind].utility for kind in queries.types])
    return of_simulated(cell, found, utilities, STAGE)


def requests_of(source: Source, cell: Cell) -> load.Requests:
    """The queries of a cell, whatever its method."""
    rates = load.synthetic_rps(source.seconds, cell.seed) if cell.workload == SYNTHETIC else source.bursty_rps
    return load.requests(rates, cell.factor, cell.seed)


def _scenario(method: Method, queries: load.Requests, seconds: int) -> Scenario:
    pipeline = pipeline_of(method)
    wishes = [
        RequestOptions(timeout_seconds=query.seconds, utility=query.utility, task=query.task) for query in QUERIES
    ]
    return Scenario(
        pipeline=pipeline,
        profiles={STAGE: profile_of(method.options)},
        arrivals_seconds=queries.at_seconds,
        duration_seconds=float(seconds),
        plan=plan_of(method, pipeline),
        environment=Environment(spread=0.0, load_seconds=LOAD_SECONDS),
        policy=method.policy,
        options=tuple(wishes[kind] for kind in queries.types),
    )


def pipeline_of(method: Method) -> InferencePipeline:
    """One stage that runs the model at the method's points."""
    stage = {
        "name": STAGE,
        "inputs": [{"name": "x", "from": "request.inputs.x"}],
        "outputs": [{"name": "y", "datatype": "FP32"}, {"name": "confidence", "datatype": "FP32"}],
        "confidence": "confidence",
        "variants": [
            {
                "name": "vit",
                "family": "echo",
                "storageUri": "random://?seed=1",
                "accuracy": max(option.mean_accuracy for option in method.options),
                "maxBatchSize": FULL_BATCH,
                "operatingPoints": [
                    {"name": _name(option), "accuracy": option.mean_accuracy} for option in method.options
                ],
            }
        ],
    }
    spec = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}],
        "outputs": [{"name": "y", "from": "classify.outputs.y"}],
        "stages": [stage],
        "slo": {"latency": "1s"},
        "budget": {"cores": "1"},
        "schedulingPolicy": "TokenAdaptive",
        "dropPolicy": "Predicted" if method.evicts else "Never",
        "queue": {"maxRows": 1_000_000},
    }
    return InferencePipeline.model_validate({"metadata": {"name": "otas"}, "spec": spec})


def _name(option: Option) -> str:
    """Names of points begin with a letter."""
    return f"g{option.name}" if option.name[-1].isdigit() else option.name


def profile_of(options: Sequence[Option]) -> ModelProfile:
    """What the points were measured to take, by their laws."""
    points = []
    for option in options:
        linear = option.seconds(2) - option.seconds(1)
        fit = LatencyFit(quadratic=0, linear=linear, constant=option.seconds(0), mean_relative_error=0)
        measured = tuple(
            Measurement(
                batch_size=rows,
                latency_seconds_mean=option.seconds(rows),
                latency_seconds_p50=option.seconds(rows),
                latency_seconds_p99=option.seconds(rows),
                throughput_rps=rows / option.seconds(rows),
                batches=1,
            )
            for rows in BATCHES
        )
        points.append(
            PointProfile(variant="vit", operating_point=_name(option), cores=1.0, measurements=measured, fit=fit)
        )
    hardware = {"processor": "the paper's card", "nodeCores": 1}
    spec = {"pipeline": "otas", "stage": STAGE, "hardware": hardware, "points": [p.model_dump() for p in points]}
    return ModelProfile.model_validate({"metadata": {"name": "otas-classify"}, "spec": spec})


def plan_of(method: Method, pipeline: InferencePipeline) -> PipelinePlan:
    """One replica that may run every point of the method; the most accurate is the planned one."""
    options = sorted(method.options, key=lambda option: -option.mean_accuracy)
    points = [
        {
            "name": _name(option),
            "accuracy": option.mean_accuracy,
            "accuracyByTask": option.accuracy,
            "serviceSeconds": {str(rows): option.seconds(rows) for rows in BATCHES},
            "escalations": _looks(option, options) if method.looks else [],
        }
        for option in options
    ]
    best = {key: value for key, value in points[0].items() if key != "name"}
    stage = {"name": STAGE, "variant": "vit", "batchSize": FULL_BATCH, "replicas": 1, "fallbacks": points[1:]}
    stage |= {"operatingPoint": points[0]["name"]} | best
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": 0.0, "stages": [stage]}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def _looks(option: Option, options: Sequence[Option]) -> list[dict[str, object]]:
    """Second looks, which the paper has not: the least certain share p is assumed to hold 1 − (1 − p)² of a gain."""
    low = option.mean_accuracy
    return [
        {
            "to": _name(better),
            "confidenceBelow": share,
            "share": share,
            "accuracy": round(low + (1 - (1 - share) ** 2) * (better.mean_accuracy - low), 4),
        }
        for better in options
        if better.mean_accuracy > low + 0.005
        for share in SHARES
    ]
