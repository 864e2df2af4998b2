"""One cell of the evaluation: a pipeline under a workload, planned by one method, with one seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ipa import data
from benchmarks.ipa.data import Workload
from benchmarks.papers.planners import fa2, fa2_heaviest, fa2_lightest, plan_for_peak, rim, rim_sized_for
from trimtab_adapter.planning.decide import Planner, PlanningInputs, decide
from trimtab_adapter.simulation.control_loop import SimulatedControlLoop, oracle_forecaster
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_pipelines.spec import InferencePipeline

OURS, REACTIVE, ORACLE = "trimtab", "trimtab, reactive", "trimtab, oracle"
RANKS = "trimtab, ranks"
"""With the objective of the paper's submission: the sum of the stages' normalised ranks in place of PAS."""
STATIC = "static for the peak"
BASELINES = ("FA2-low", "FA2-low, best", "FA2-high", "FA2-high, best", "RIM", "RIM, best", STATIC)
METHODS = (OURS, REACTIVE, ORACLE, RANKS, *BASELINES)
FORECASTERS = {REACTIVE: "Reactive", ORACLE: "Oracle"}
FIRST_PEAK_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """What to simulate. `accuracy_weight` replaces the pipeline's own α where it is not None."""

    pipeline: str
    workload: str
    method: str
    seed: int
    accuracy_weight: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a cell. `served_accuracy` counts every request: what was late or dropped counts 0."""

    cell: Cell
    requests: int
    accuracy: float
    served_accuracy: float
    cores: float
    late: float
    dropped: float
    objective: float
    p99_seconds: float
    changes: int
    timeline: tuple[tuple[float, float, float, float], ...] = ()
    """Seconds, cores reserved, accuracy planned, requests per second planned for: one entry a decision."""

    @property
    def violations(self) -> float:
        """Share of the requests without an answer in time."""
        return self.late + self.dropped


@dataclass(frozen=True, slots=True)
class Source:
    """Where everything is read from."""

    folder: Path
    manifests: Path
    trace: Path
    offset_seconds: int = 0
    published: bool = False
    seconds: int | None = None
    """Cut each workload to so many seconds; None for all of it."""


@cache
def workloads_of(source: Source) -> dict[str, Workload]:
    """Read the workloads, once a process."""
    found = data.workloads(source.trace, source.offset_seconds, published=source.published)
    return {one.name: replace(one, rates_rps=one.rates_rps[: source.seconds]) for one in found}


@cache
def pipeline_of(source: Source, name: str) -> tuple[InferencePipeline, dict[str, ModelProfile]]:
    """Read a pipeline and its profiles, once a process."""
    pipeline = load_pipeline(source.manifests / name)
    return pipeline, data.profiles(source.folder, pipeline)


def measure(source: Source, cell: Cell) -> Measured:
    """Simulate a cell."""
    as_written, profiles = pipeline_of(source, cell.pipeline)
    pipeline = _changed(as_written, cell)
    workload = workloads_of(source)[cell.workload]
    arrivals = poisson_arrivals(workload.rates_rps, cell.seed)
    found = simulate(_scenario(source, cell, pipeline, profiles, workload, arrivals))
    return _measured(cell, as_written, found)


def _changed(pipeline: InferencePipeline, cell: Cell) -> InferencePipeline:
    """Set the forecaster and, in the sweep, the weight of accuracy."""
    spec = pipeline.spec
    forecaster = FORECASTERS.get(cell.method, "LSTM")
    adaptation = spec.adaptation.model_copy(update={"forecaster": forecaster})
    objective = spec.objective
    if cell.method == RANKS:  # our ranks are a mean over the stages, the paper's a sum
        summed = objective.accuracy_weight * len(spec.stages)
        objective = objective.model_copy(update={"accuracy_metric": "NormalizedRanks", "accuracy_weight": summed})
    if cell.accuracy_weight is not None:
        objective = objective.model_copy(update={"accuracy_weight": cell.accuracy_weight})
    changed = spec.model_copy(update={"adaptation": adaptation, "objective": objective})
    return pipeline.model_copy(update={"spec": changed})


def _scenario(
    source: Source,
    cell: Cell,
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    workload: Workload,
    arrivals: NDArray[np.float64],
) -> Scenario:
    peak = float(np.bincount(arrivals.astype(np.int64)).max())
    forecaster = oracle_forecaster(pipeline.spec.adaptation, arrivals, len(workload.rates_rps), 0.0)
    chosen = _planner(source, cell, pipeline, profiles, peak)
    first = ForecastRecord(
        peak_rps=float(max(workload.history_rps[-FIRST_PEAK_SECONDS:], default=1)), source="reactive"
    )
    static = cell.method == STATIC
    return Scenario(
        pipeline=pipeline,
        profiles=profiles,
        arrivals_seconds=arrivals,
        duration_seconds=float(len(workload.rates_rps)),
        plan=plan_for_peak(pipeline, profiles, peak)
        if static
        else chosen(pipeline, profiles, PlanningInputs(first, 0.0)),
        adaptation=None if static else SimulatedControlLoop(forecaster, chosen),
        history_rps=workload.history_rps,
        environment=Environment(),
        seed=cell.seed,
    )


def _planner(
    source: Source, cell: Cell, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], peak_rps: float
) -> Planner:
    settings = data.published(source.folder, pipeline)
    planners: Mapping[str, Callable[[], Planner]] = {
        "FA2-low": lambda: fa2(settings.fa2_low),
        "FA2-low, best": lambda: fa2_lightest(pipeline, profiles),
        "FA2-high": lambda: fa2(settings.fa2_high),
        "FA2-high, best": lambda: fa2_heaviest(pipeline, profiles),
        "RIM": lambda: rim(settings.rim_replicas),
        "RIM, best": lambda: rim_sized_for(pipeline, profiles, peak_rps),
    }
    return planners.get(cell.method, lambda: decide)()


def _measured(cell: Cell, pipeline: InferencePipeline, found: SimulationResult) -> Measured:
    objective = pipeline.spec.objective
    in_time = np.where(found.outcomes == OK, np.nan_to_num(found.accuracy), 0.0)
    late, violations = found.share(LATE), found.violations
    gained = objective.accuracy_weight * found.mean_accuracy - objective.cost_weight * found.mean_cores
    return Measured(
        cell=cell,
        requests=int(found.outcomes.size),
        accuracy=found.mean_accuracy,
        served_accuracy=float(in_time.mean()) if in_time.size else float("nan"),
        cores=found.mean_cores,
        late=late,
        dropped=violations - late,
        objective=gained,
        p99_seconds=found.latency(0.99),
        changes=sum(a.spec.generation != b.spec.generation for a, b in zip(found.plans, found.plans[1:], strict=False)),
        timeline=_timeline(found),
    )


def _timeline(found: SimulationResult) -> tuple[tuple[float, float, float, float], ...]:
    cores = {second.at_seconds: second.cores for second in found.seconds}
    return tuple(
        (
            plan.spec.created_at,
            cores.get(float(int(plan.spec.created_at)), float("nan")),
            plan.spec.expected.accuracy if plan.spec.expected else float("nan"),
            plan.spec.forecast.peak_rps if plan.spec.forecast else float("nan"),
        )
        for plan in found.plans
    )
