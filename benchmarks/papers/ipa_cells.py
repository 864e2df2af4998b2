"""Cells of IPA's evaluation: a pipeline under a workload, planned by one method, with one seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.grid import Cell, grid
from benchmarks.papers import ipa_data
from benchmarks.papers.ipa_data import Workload
from benchmarks.papers.ipa_measured import read_measured
from benchmarks.papers.planners import fa2, fa2_heaviest, fa2_lightest, plan_for_peak, rim, rim_sized_for
from trimtab_adapter.controller import Controller
from trimtab_adapter.planning.decide import Planner, PlanningInputs, decide
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, forecaster_of, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage

PIPELINES = ("video", "audio-qa", "audio-sent", "sum-qa", "nlp")
PAPER_VIDEO = Path(__file__).with_name("ipa_video.yaml")
"""With the paper's detectors, which pipelines/video does not have."""
OURS, REACTIVE, ORACLE = "trimtab", "trimtab, reactive", "trimtab, oracle"
STATIC = "static for the peak"
BASELINES = ("FA2-low", "FA2-low, best", "FA2-high", "FA2-high, best", "RIM", "RIM, best", STATIC)
METHODS = (OURS, REACTIVE, ORACLE, *BASELINES)
FORECASTERS = {REACTIVE: "Reactive", ORACLE: "Oracle"}
FIRST_PEAK_SECONDS = 20
YOLO = ("yolov5n", "yolov5s", "yolov5m", "yolov5l", "yolov5x")
LATENCY_QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Source:
    """Files of the evaluation."""

    folder: Path
    manifests: Path
    trace: Path
    offset_seconds: int = 0
    """Second of the recording at which the trace begins."""
    published: bool = False
    """Whether the paper's own excerpts are used."""
    seconds: int | None = None
    """Maximum length of each workload; None for all of it."""
    mixes: bool = False
    """Whether our planner may mix variants of a stage."""
    measured: Path | None = None
    """Profiles measured on a machine; None for the reconstructed ones."""


@cache
def read_workloads(source: Source) -> dict[str, Workload]:
    """Read the workloads, once a process."""
    return ipa_data.read_workloads(
        source.trace, source.offset_seconds, published=source.published, max_seconds=source.seconds
    )


@cache
def read_pipeline(source: Source, name: str) -> tuple[InferencePipeline, dict[str, ModelProfile]]:
    """Read a pipeline and its profiles, once a process."""
    is_paper_video = name == "video" and source.measured is None
    pipeline = load_pipeline(PAPER_VIDEO if is_paper_video else source.manifests / name)
    if source.measured is None:
        return pipeline, ipa_data.read_profiles(source.folder, pipeline)
    return read_measured(pipeline, source.measured, ipa_data.read_baseline_settings(source.folder, pipeline))


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """What a planner achieved in a cell; `served_accuracy` counts late and dropped requests as 0."""

    cell: Cell
    requests: int
    accuracy: float
    served_accuracy: float
    cores: float
    late: float
    dropped: float
    objective: float
    latency_seconds: tuple[float, ...]
    """At LATENCY_QUANTILES."""

    @property
    def p99_seconds(self) -> float:
        return self.latency_seconds[LATENCY_QUANTILES.index(0.99)]

    @property
    def violations(self) -> float:
        """Share of the requests without an answer in time."""
        return self.late + self.dropped


def cells(names: Sequence[str], workloads: Sequence[str], seeds: int) -> list[Cell]:
    return grid([(name, workload) for name in names for workload in workloads], METHODS, seeds=seeds)


def measure(source: Source, cell: Cell) -> PlannerRow:
    """Simulate a cell."""
    name, workload_name = cell.case
    pipeline, profiles = read_pipeline(source, name)
    workload = read_workloads(source)[workload_name]
    arrivals = poisson_arrivals(workload.rates_rps, cell.seed)
    changed = _with_forecaster(pipeline, cell.method, mixes=source.mixes)
    result = simulate(_scenario(source, cell, changed, profiles, workload, arrivals))
    return _row(cell, pipeline, result)


def _with_forecaster(pipeline: InferencePipeline, method: str, *, mixes: bool) -> InferencePipeline:
    adaptation = pipeline.spec.adaptation.replace(forecaster=FORECASTERS.get(method, "LSTM"))
    mixed: dict[str, Any] = {}
    if mixes and method not in BASELINES:
        mixed = {"scheduling_policy": "TokenAdaptive", "stages": tuple(map(_hosting, pipeline.spec.stages))}
    return pipeline.with_spec(adaptation=adaptation, **mixed)


def _hosting(stage: Stage) -> Stage:
    """The stage with as much memory for each variant as for the largest with its cores: one replica hosts them."""
    memory: dict[float, int] = {}
    for resources in (variant.resources for variant in stage.variants):
        memory[resources.cpu] = max(memory.get(resources.cpu, 0), resources.memory)
    variants = [
        variant.replace(resources=variant.resources.replace(memory=memory[variant.resources.cpu]))
        for variant in stage.variants
    ]
    return stage.replace(variants=tuple(variants))


def _scenario(
    source: Source,
    cell: Cell,
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    workload: Workload,
    arrivals: NDArray[np.float64],
) -> Scenario:
    peak_rps = float(np.bincount(arrivals.astype(np.int64)).max())
    planner = _planner(source, cell.method, pipeline, profiles, peak_rps)
    if cell.method == STATIC:
        plan, controller = plan_for_peak(pipeline, profiles, peak_rps), None
    else:
        first_rps = float(max(workload.history_rps[-FIRST_PEAK_SECONDS:], default=1))
        first = ForecastRecord(peak_rps=first_rps, source="reactive")
        plan = planner(pipeline, profiles, PlanningInputs(first, 0.0))
        forecaster = forecaster_of(pipeline.spec.adaptation, arrivals, len(workload.rates_rps))
        controller = Controller(forecaster, planner)
    return Scenario(
        pipeline=pipeline,
        profiles=profiles,
        arrivals_seconds=arrivals,
        duration_seconds=float(len(workload.rates_rps)),
        plan=plan,
        controller=controller,
        history_rps=workload.history_rps,
        environment=Environment(),
        seed=cell.seed,
    )


def _planner(
    source: Source, method: str, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], peak_rps: float
) -> Planner:
    settings = ipa_data.read_baseline_settings(source.folder, pipeline)
    planners: Mapping[str, Callable[[], Planner]] = {
        "FA2-low": lambda: fa2(_variants(pipeline, settings, "fa2_low")),
        "FA2-low, best": lambda: fa2_lightest(pipeline, profiles),
        "FA2-high": lambda: fa2(_variants(pipeline, settings, "fa2_high")),
        "FA2-high, best": lambda: fa2_heaviest(pipeline, profiles),
        "RIM": lambda: rim({name: int(stage["rim_replicas_high_load"]) for name, stage in settings.items()}),
        "RIM, best": lambda: rim_sized_for(pipeline, profiles, peak_rps),
    }
    return planners.get(method, lambda: decide)()


def _variants(pipeline: InferencePipeline, settings: Mapping[str, Mapping[str, str]], method: str) -> dict[str, str]:
    """A baseline's variants by stage: the paper's, of another detector the one of the same place by size."""
    chosen = {}
    for stage in pipeline.spec.stages:
        name, own = settings[stage.name][method], [variant.name for variant in stage.variants]
        chosen[stage.name] = name if name in own else own[YOLO.index(name)]
    return chosen


def _row(cell: Cell, pipeline: InferencePipeline, result: SimulationResult) -> PlannerRow:
    objective = pipeline.spec.objective
    in_time = np.where(result.outcomes == OK, np.nan_to_num(result.accuracy), 0.0)
    late = result.share(LATE)
    return PlannerRow(
        cell=cell,
        requests=int(result.outcomes.size),
        accuracy=result.mean_accuracy,
        served_accuracy=float(in_time.mean()) if in_time.size else math.nan,
        cores=result.mean_cores,
        late=late,
        dropped=result.violations - late,
        objective=objective.accuracy_weight * result.mean_accuracy - objective.cost_weight * result.mean_cores,
        latency_seconds=tuple(map(result.latency, LATENCY_QUANTILES)),
    )
