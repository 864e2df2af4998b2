"""What should run: pipeline + profiles + forecast + what was measured + the plan before → the next plan. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_adapter.planning.allowed_points import allowed_points
from trimtab_adapter.planning.batch_enlargement import enlarge_batches
from trimtab_adapter.planning.drift_correction import (
    Joined,
    Watched,
    apply_observed_accuracy,
    drifted_points,
    with_registered_tasks,
)
from trimtab_adapter.planning.expectation import expectation
from trimtab_adapter.planning.explain import basis_words, explain, line
from trimtab_adapter.planning.hysteresis import planning_load, why_more
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.profile_lookup import prefill_profile
from trimtab_adapter.planning.program_builder import capped_batch_sizes
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_adapter.planning.shared_machine import MachineLoad, within_machine
from trimtab_adapter.solvers.program import Option, Program
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan, PipelinePlanSpec, StagePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.shadow_price import priced
from trimtab_pipelines.spec import InferencePipeline

__all__ = [
    "PlanningError",
    "PlanningInputs",
    "decide",
    "first_situation",
    "initial_plan",
    "plan_of",
    "planning_problem",
]


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """What is known when a decision is due."""

    forecast: ForecastRecord
    now_seconds: float  # Unix time
    current: PipelinePlan | None = None
    recent_rps: tuple[tuple[float, float], ...] = ()  # (time, forecast peak) of earlier decisions
    rows_per_request: Mapping[str, float] = field(default_factory=dict)  # measured, by stage
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)  # measured, by stage and variant
    accuracies: Mapping[Watched, float] = field(default_factory=dict)  # drifted
    joined: Joined = field(default_factory=dict)
    strain: float = 1.0  # over profiled times of who writes, as broken promises tell
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)  # measured, by the stage that writes
    machine: MachineLoad | None = None  # the one that all replicas share with others


def decide(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], situation: PlanningInputs
) -> PipelinePlan:
    """The next plan. Its generation is the current one's where nothing changed, else one more.

    Raises PlanningError where the profiles do not fit the pipeline or its budget cannot hold any plan.
    """
    with time_limit():
        question, forecast = planning_problem(pipeline, profiles, situation)
        return plan_of(pipeline, question, solve_or_relax(question), forecast, situation.now_seconds)


def planning_problem(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], situation: PlanningInputs
) -> tuple[PlanningProblem, ForecastRecord]:
    """What to ask of the solver, eased, and the load it is for: the forecast, held and steadied."""
    current = situation.current
    planned_rps = current.spec.forecast.peak_rps if current is not None and current.spec.forecast is not None else None
    load_rps = planning_load(
        situation.forecast.peak_rps,
        situation.recent_rps,
        planned_rps,
        situation.now_seconds,
        pipeline.spec.adaptation.scale_down_stabilization_seconds,
    )
    asked = with_registered_tasks(pipeline.spec, situation.joined)
    spec = apply_observed_accuracy(asked, situation.accuracies)  # tasks that joined drift as all do
    question = PlanningProblem(
        spec,
        profiles,
        load_rps,
        situation.rows_per_request,
        situation.service_ratios,
        current,
        situation.strain,
        drifted_points(asked, spec),
        situation.prompt_tokens,
    )
    hold_seconds = pipeline.spec.adaptation.scale_down_stabilization_seconds
    held = why_more(situation.forecast.peak_rps, load_rps, planned_rps, hold_seconds)
    forecast = situation.forecast.model_copy(update={"peak_rps": load_rps, "held": held})
    with time_limit():
        return within_machine(question, situation.machine), forecast


def initial_plan(
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    load_rps: float = 1.0,
    now_seconds: float = 0.0,
) -> PipelinePlan:
    """The plan to start with, before any load was seen: the best one for a small load."""
    return decide(pipeline, profiles, first_situation(load_rps, now_seconds))


def first_situation(load_rps: float = 1.0, now_seconds: float = 0.0) -> PlanningInputs:
    """What is known before any load was seen."""
    return PlanningInputs(ForecastRecord(peak_rps=load_rps, source="initial", reason="no load seen yet"), now_seconds)


def plan_of(
    pipeline: InferencePipeline,
    question: PlanningProblem,
    found: PlanSolution,
    forecast: ForecastRecord,
    now_seconds: float,
) -> PipelinePlan:
    """Write an answer as a plan, with its reasons."""
    current = question.current
    choice = planned(question, found.program, found.solution.choice)
    by_name = {
        stage.name: _stage_plan(question, stage.name, option)
        for stage, option in zip(found.program.stages, choice, strict=True)
    }
    stages = tuple(by_name[stage.name][0] for stage in pipeline.spec.stages)
    if pipeline.spec.scheduling_policy == "ModalityMix":  # the only one that heeds a price
        stages = tuple(priced(stage, question.stage_rps(stage.name)) for stage in stages)
    left_out = tuple(why for stage in pipeline.spec.stages for why in by_name[stage.name][1])
    before = 0 if current is None else current.spec.generation
    changed = current is None or _lines(current.spec.stages) != _lines(stages)
    cause = f"planned for {forecast.peak_rps:.3g} requests/s by {forecast.source}"
    cause += f": {forecast.hold_reason}" if forecast.hold_reason else ""
    strained = question.strain > 1.0 and any(stage.generates for stage in question.spec.stages)
    cause += "".join(f"; {offered}" for offered in map(question.offered, question.spec.stages) if offered)
    cause += f"; with {question.strain:.3g} times the profiled seconds, since promises were broken" if strained else ""
    cause += f"; {question.beside_others}" if question.beside_others else ""
    spec = PipelinePlanSpec(
        pipeline=pipeline.name,
        generation=before + 1 if changed else before,
        created_at=now_seconds,
        feasible=found.feasible,
        reason=found.reason,
        planned_fraction=found.fraction,
        stages=stages,
        forecast=forecast,
        expected=expectation(question, found.program, choice, stages),
        explanation=explain(found, stages, current, cause).model_copy(
            update={
                "accuracy_basis": basis_words(question.spec, stages),
                "excluded_points": left_out,
                "batch_sizes_capped": capped_batch_sizes(question.spec),
                "drifted_accuracies": question.drifts,
            }
        ),
    )
    metadata = Metadata(name=pipeline.name, namespace=pipeline.metadata.namespace)
    return PipelinePlan(metadata=metadata, spec=spec)


def _lines(stages: Sequence[StagePlan]) -> list[tuple[str, str, float, list[tuple[str, str, float]]]]:
    return [(stage.name, line(stage), stage.cores, _by_task(stage)) for stage in stages]


def _by_task(stage: StagePlan) -> list[tuple[str, str, float]]:
    return sorted((point.name, *each) for point in stage.points for each in point.accuracy_by_task.items())


def _stage_plan(question: PlanningProblem, name: str, option: Option) -> tuple[StagePlan, tuple[str, ...]]:
    """The plan of a stage, and which points are left out of it and why.

    Service seconds are the profile's medians, uncorrected: the router measures its ratio against them.
    """
    stage = question.spec.stage(name)
    variant = stage.variant(option.variant)
    sizes = sorted({size for size in (*stage.batch_sizes, 1) if size < option.batch_size} | {option.batch_size})
    allowed = allowed_points(question, stage, variant, option.operating_point, sizes)
    planned = allowed.planned
    reads = prefill_profile(question, stage, variant, variant.point(option.operating_point))
    plan = StagePlan(
        name=name,
        variant=option.variant,
        batch_size=option.batch_size,
        replicas=option.replicas,
        operating_point=option.operating_point,
        upgrades=allowed.upgrades,
        fallbacks=allowed.fallbacks,
        cores=variant.resources.cpu,
        accuracy=planned.accuracy,
        accuracy_by_task=planned.accuracy_by_task,
        inputs=planned.inputs,
        service_seconds=planned.service_seconds,
        escalations=planned.escalations,
        planned_escalation=option.planned_escalation,
        prompt_tokens=reads.tokens,
        prefill_seconds=reads.seconds,
        throughput_rps=option.throughput_rps,
        latency_seconds=option.latency_seconds,
    )
    return plan, allowed.left_out


def planned(question: PlanningProblem, program: Program, choice: Sequence[Option]) -> tuple[Option, ...]:
    """What a solution becomes as a plan: free latency goes to larger batches, of stages that change anyway."""
    named = zip(program.stages, choice, strict=True)
    running = [(stage.name, option, question.running(stage.name)) for stage, option in named]
    moving = {name for name, option, before in running if before is None or line(before) != line(option)}
    return enlarge_batches(program, choice, moving)
