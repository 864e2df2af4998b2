"""Baselines: plans that never adapt, with fixed variants and all the cores of the budget, and plans of one variant."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from trimtab_adapter.planning.decide import build_plan
from trimtab_adapter.planning.planning_problem import PlanningProblem, profiled_points
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_adapter.solvers.program import TOLERANCE, Option
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile, PointProfile
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant

Extreme = Literal["lightest", "heaviest"]
_HALVINGS = 16


def static_plan(
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    choice: Extreme,
    load_rps: float,
    now_seconds: float = 0.0,
) -> PipelinePlan:
    """The best plan with each stage's lightest or heaviest variant: it carries the most load within the budget.

    Batch sizes are those with the highest throughput within the SLO; the rest of the budget becomes replicas of the
    busiest stages. `load_rps` is the load the plan is recorded and judged for.
    """
    objective = pipeline.spec.objective.replace(accuracy_floor=None, goal="Weighted")
    free = PlanningProblem(pipeline.spec.replace(objective=objective), profiles, 0.0)
    pins = {stage.name: pin_extreme(free, stage, choice) for stage in pipeline.spec.stages}
    pinned = pipeline.replace(spec=with_pins(free.spec, pins))
    max_rps = _max_load(pinned, profiles)
    problem = PlanningProblem(pinned.spec, profiles, max_rps)
    solved = solve_or_relax(problem)
    solved = _spread(problem, solved)
    carried = max_rps * solved.fraction
    share = min(1.0, carried / load_rps) if load_rps > 0 else 1.0
    if solved.feasible and share < 1.0:
        reason = f"static: carries {carried:.3g} of {load_rps:.3g} requests/s within the SLO"
        solved = replace(solved, reason=reason)
    solved = replace(solved, fraction=share)
    forecast = ForecastRecord(peak_rps=load_rps, source="static", reason=f"{choice} variants, never changed")
    return build_plan(pinned, problem, solved, forecast, now_seconds)


def with_single_variants(pipeline: InferencePipeline) -> InferencePipeline:
    """The pipeline with plans of one variant and operating point a stage at a time, which serve every batch."""
    return pipeline.with_spec(scheduling_policy="EarliestDeadlineFirst")


def with_pins(spec: InferencePipelineSpec, pins: Mapping[str, Pin]) -> InferencePipelineSpec:
    return spec.replace(stages=tuple(stage.replace(pin=pins[stage.name]) for stage in spec.stages))


def pin_extreme(problem: PlanningProblem, stage: Stage, which: Extreme) -> Pin:
    """Pin a stage's cheapest point by core-seconds a row, or its most accurate; ties go to the better one."""
    points = profiled_points(problem, stage)

    def core_seconds(entry: tuple[Variant, OperatingPoint, PointProfile]) -> float:
        variant, _, profile = entry
        return min(variant.resources.cpu / profile.throughput_rps(size) for size in stage.batch_sizes)

    if which == "lightest":
        variant, point, _ = min(points, key=lambda entry: (core_seconds(entry), -entry[1].accuracy))
    else:
        variant, point, _ = max(points, key=lambda entry: (entry[1].accuracy, core_seconds(entry)))
    return Pin(variant=variant.name, operating_point=point.name)


def _max_load(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> float:
    """Bisect for the greatest load with a feasible plan; 0 if there is none."""

    def fits(load_rps: float) -> bool:
        return solve_or_relax(PlanningProblem(pipeline.spec, profiles, load_rps)).feasible

    if not fits(0.0):
        return 0.0
    high = 1.0
    while fits(high):
        high *= 2.0
    low = high / 2.0 if high > 1.0 else 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _spread(problem: PlanningProblem, solved: PlanSolution) -> PlanSolution:
    """Give the remaining cores to the busiest stage, replica by replica."""
    chosen = {stage.name: option for stage, option in zip(solved.program.stages, solved.solution.choice, strict=True)}
    replicas = {name: option.replicas for name, option in chosen.items()}

    def carried_rps(name: str) -> float:
        replica_rps = chosen[name].throughput_rps / chosen[name].replicas
        return replica_rps * replicas[name] / problem.spec.expected_rows[name]

    while room := [name for name in replicas if _has_room(problem, chosen, replicas, name)]:
        replicas[min(room, key=carried_rps)] += 1
    pins = {
        name: Pin(
            variant=option.variant,
            operating_point=option.operating_point,
            batch_size=option.batch_size,
            replicas=replicas[name],
        )
        for name, option in chosen.items()
    }
    spread = solve_or_relax(replace(problem, spec=with_pins(problem.spec, pins)))
    return spread if spread.feasible else solved


def _has_room(problem: PlanningProblem, chosen: Mapping[str, Option], replicas: Mapping[str, int], name: str) -> bool:
    counts, budget = {**replicas, name: replicas[name] + 1}, problem.spec.budget
    cores = sum(option.cores / option.replicas * counts[stage] for stage, option in chosen.items())
    gpus = sum(option.gpus / option.replicas * counts[stage] for stage, option in chosen.items())
    in_bounds = counts[name] <= problem.spec.stage(name).max_replicas
    return in_bounds and cores <= budget.cores + TOLERANCE and gpus <= budget.gpus + TOLERANCE
