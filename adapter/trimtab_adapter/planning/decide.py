"""`decide`: the next plan from a pipeline, its profiles, a forecast, measurements and the current plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_adapter.planning.allowed_points import allowed_points
from trimtab_adapter.planning.batch_enlargement import enlarge_batches, max_batch_size, sizes_above
from trimtab_adapter.planning.drift_correction import (
    AccuracyKey,
    RegisteredAccuracies,
    ThresholdKey,
    apply_observed_accuracy,
    apply_observed_shares,
    drifted_points,
    with_registered_tasks,
)
from trimtab_adapter.planning.expectation import StageExpectation, expectation, stage_expectation
from trimtab_adapter.planning.explain import accuracy_basis_note, describe_option, explain
from trimtab_adapter.planning.hysteresis import load_hold_reason, planning_load
from trimtab_adapter.planning.planning_problem import PlanningProblem, prefill_profile
from trimtab_adapter.planning.program_builder import capped_batch_sizes
from trimtab_adapter.planning.relaxation import PlanSolution, relax, solve_or_relax
from trimtab_adapter.solvers.program import TOLERANCE, Option, Program
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan, PipelinePlanSpec, StagePlan, costs_by_flavor
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """Forecast, measurements and current plan at the time of a decision."""

    forecast: ForecastRecord
    now_seconds: float
    """Unix time."""
    current: PipelinePlan | None = None
    recent_rps: tuple[tuple[float, float], ...] = ()
    """(time, forecast peak) of earlier decisions."""
    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    """Measured, by stage."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured, by stage and variant."""
    accuracies: Mapping[AccuracyKey, float] = field(default_factory=dict)
    """Observed accuracies that drifted from the profile."""
    registered_accuracies: RegisteredAccuracies = field(default_factory=dict)
    escalated_shares: Mapping[ThresholdKey, float] = field(default_factory=dict)
    """Observed shares of rows below the thresholds of escalations."""
    slowdown: float = 1.0
    """Factor on the profiled times of generation stages, estimated from missed SLOs."""
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    """Measured, by generation stage."""
    router_cpu_seconds: float = 0.0
    """Measured CPU time of a router for a request; 0 if unmeasured."""


Planner = Callable[[InferencePipeline, Mapping[str, ModelProfile], PlanningInputs], PipelinePlan]
"""The signature of `decide`, of pool planners and of baselines."""


def decide(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs) -> PipelinePlan:
    """The next plan. Its generation stays the current one's if nothing changed, else it increases by one.

    Raises PlanningError if the profiles do not fit the pipeline or its budget cannot hold any plan.
    """
    with time_limit():
        problem, forecast = planning_problem(pipeline, profiles, inputs)
        return build_plan(pipeline, problem, solve_or_relax(problem), forecast, inputs.now_seconds)


def planning_problem(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs
) -> tuple[PlanningProblem, ForecastRecord]:
    """The relaxed problem to solve, and the forecast with hysteresis applied."""
    current = inputs.current
    planned_rps = current.spec.forecast.peak_rps if current is not None and current.spec.forecast is not None else None
    forecast_rps, adaptation = inputs.forecast.peak_rps, pipeline.spec.adaptation
    hold_seconds = adaptation.scale_down_stabilization_seconds
    load_rps = planning_load(
        forecast_rps, inputs.recent_rps, planned_rps, inputs.now_seconds, hold_seconds, adaptation.headroom
    )
    requested = with_registered_tasks(pipeline.spec, inputs.registered_accuracies)
    spec, changed_shares = apply_observed_shares(
        apply_observed_accuracy(requested, inputs.accuracies), inputs.escalated_shares
    )
    problem = PlanningProblem(
        spec,
        profiles,
        load_rps,
        inputs.rows_per_request,
        inputs.service_ratios,
        current,
        inputs.slowdown,
        drifted_points(requested, spec),
        inputs.prompt_tokens,
        inputs.router_cpu_seconds,
        changed_shares,
    )
    hold_reason = load_hold_reason(forecast_rps, load_rps, planned_rps, hold_seconds)
    forecast = inputs.forecast.replace(peak_rps=load_rps, hold_reason=hold_reason)
    with time_limit():
        return relax(problem), forecast


def initial_plan(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], load_rps: float = 1.0, now_seconds: float = 0.0
) -> PipelinePlan:
    """The best plan for a small load, used before any load was observed."""
    return decide(pipeline, profiles, initial_inputs(load_rps, now_seconds))


def initial_inputs(load_rps: float = 1.0, now_seconds: float = 0.0) -> PlanningInputs:
    forecast = ForecastRecord(peak_rps=load_rps, source="initial", reason="no load observed yet")
    return PlanningInputs(forecast, now_seconds)


def build_plan(
    pipeline: InferencePipeline,
    problem: PlanningProblem,
    solved: PlanSolution,
    forecast: ForecastRecord,
    now_seconds: float,
) -> PipelinePlan:
    current, routers = problem.current, problem.routers
    choice = enlarge_batches(problem, solved.program, solved.solution.choice)
    by_name = planned_stages(problem, solved.program, choice)
    stages = tuple(by_name[stage.name].plan for stage in pipeline.spec.stages)
    if pipeline.spec.policy_name == "ModalityMix":  # the only policy that uses shadow prices
        stages = tuple(with_shadow_price(stage, problem.stage_rps(stage.name)) for stage in stages)
    excluded = tuple(why for stage in pipeline.spec.stages for why in by_name[stage.name].excluded)
    before = 0 if current is None else current.spec.generation
    changed = (
        current is None or current.spec.routers != routers or _comparable(current.spec.stages) != _comparable(stages)
    )
    expected = expectation(solved.program, choice, [stage.accuracy for stage in by_name.values()])
    costs = costs_by_flavor(stages, problem.spec) if problem.spec.flavors else {}
    spec = PipelinePlanSpec(
        pipeline=pipeline.name,
        generation=before + 1 if changed else before,
        created_at=now_seconds,
        feasible=solved.feasible,
        reason=solved.reason,
        planned_fraction=solved.fraction,
        stages=stages,
        routers=routers,
        forecast=forecast,
        expected=expected.replace(cost_per_hour=sum(costs.values()), cost_by_flavor=costs),
        explanation=explain(solved, stages, routers, current, _cause(problem, forecast)).replace(
            accuracy_basis=accuracy_basis_note(problem.spec, stages),
            excluded_points=excluded,
            batch_sizes_capped=capped_batch_sizes(problem.spec),
            drifted_accuracies=problem.drifted_accuracies,
        ),
    )
    metadata = Metadata(name=pipeline.name, namespace=pipeline.metadata.namespace)
    return PipelinePlan(metadata=metadata, spec=spec)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """The plan of a stage, its expected accuracy, and the points excluded from it with reasons."""

    plan: StagePlan
    accuracy: float
    excluded: tuple[str, ...]


def planned_stages(problem: PlanningProblem, program: Program, choice: Sequence[Option]) -> dict[str, PlannedStage]:
    """The plan of each stage of a choice."""
    planned = {}
    for stage, option in zip(program.stages, choice, strict=True):
        plan, excluded = _stage_plan(problem, stage.name, option, _least_accuracy(problem, choice, option))
        grouped = StageExpectation(plan.expected_accuracy, {**option.rows()}) if option.rows else None
        expected = grouped or stage_expectation(problem, plan)
        shares = plan.replace(shares=expected.row_shares)
        planned[stage.name] = PlannedStage(shares, expected.accuracy, excluded)
    return planned


def _cause(problem: PlanningProblem, forecast: ForecastRecord) -> str:
    hold = f": {forecast.hold_reason}" if forecast.hold_reason else ""
    causes = [f"planned for {forecast.peak_rps:.3g} requests/s by {forecast.source}{hold}"]
    causes += problem.changed_shares
    causes += map(problem.prompt_load_note, problem.spec.stages)
    if problem.slowdown > 1.0 and any(stage.generates for stage in problem.spec.stages):
        causes.append(f"with {problem.slowdown:.3g} times the profiled seconds, because SLOs were missed")
    return "; ".join(filter(None, causes))


def _comparable(stages: Sequence[StagePlan]) -> list[tuple[object, ...]]:
    tasks = [
        {point.key(s.variant): point.accuracy_by_task for point in s.points if point.accuracy_by_task} for s in stages
    ]
    return [(stage.name, describe_option(stage), stage.cores, by) for stage, by in zip(stages, tasks, strict=True)]


def _least_accuracy(problem: PlanningProblem, choice: Sequence[Option], option: Option) -> float:
    """The least accuracy of a fallback of another variant, so that the stage keeps the floor; 0 without a floor.

    The others have their planned accuracy. A mix keeps the floor on average, so its lighter half is allowed too.
    """
    floor = problem.spec.objective.accuracy_floor
    others = math.prod(other.accuracy for other in choice if other is not option)
    return 0.0 if floor is None else min(floor / max(others, TOLERANCE), option.least_accuracy)


def _stage_plan(
    problem: PlanningProblem, name: str, option: Option, least_accuracy: float
) -> tuple[StagePlan, tuple[str, ...]]:
    """The plan of a stage, with the profile's uncorrected medians, and the points excluded from it with reasons."""
    stage = problem.spec.stage(name)
    variant = stage.variant(option.variant)
    sizes = sorted({size for size in (*stage.batch_sizes, 1) if size < option.batch_size} | {option.batch_size})
    above = sizes_above(problem, stage, option)
    allowed = allowed_points(problem, stage, option, sizes + above, least_accuracy)
    planned = allowed.planned
    prompt_tokens, prefill_seconds = prefill_profile(problem, stage, variant, variant.point(option.operating_point))
    plan = StagePlan(
        name=name,
        variant=option.variant,
        batch_size=option.batch_size,
        replicas=option.replicas,
        operating_point=option.operating_point,
        upgrades=allowed.upgrades,
        fallbacks=allowed.fallbacks,
        cores=variant.resources.cpu,
        other_groups=option.other_groups,
        accuracy=planned.accuracy,
        accuracy_by_task=planned.accuracy_by_task,
        inputs=planned.inputs,
        service_seconds=planned.service_seconds,
        escalations=planned.escalations,
        planned_escalation=option.planned_escalation,
        mixed_accuracy=option.accuracy if option.mixed else None,
        prompt_tokens=prompt_tokens,
        prefill_seconds=prefill_seconds,
        throughput_rps=option.throughput_rps,
        latency_seconds=option.latency_seconds,
    )
    return plan.replace(max_batch_size=max_batch_size(problem, stage, plan, above)), allowed.excluded
