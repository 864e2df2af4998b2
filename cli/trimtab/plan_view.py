"""Tables and text of a plan, for the terminal and the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from trimtab.options import terminal_table
from trimtab_adapter.planning.batch_enlargement import SHARE_OF_SLO, enlarge_batches
from trimtab_adapter.planning.decide import planned_stages
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.planning.sensitivity import PlanEstimate, Sensitivity, estimate, sensitivities
from trimtab_adapter.planning.spot import spot_note
from trimtab_adapter.planning.what_if import Alternative
from trimtab_adapter.solvers.program import Program
from trimtab_pipelines.plan import PipelinePlan, PointPlan, StagePlan
from trimtab_pipelines.row_shares import describe_shares
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage

STAGE_COLUMNS = ("stage", "variant", "batch size", "replicas", "cores", "accuracy", "capacity, rows/s", "latency")
POINT_COLUMNS = ("stage", "operating point", "accuracy", "time of one row", "time of a full batch", "settings")
SENSITIVITY_COLUMNS = ("change", "accuracy", "cores", "latency", "objective", "plan changes")
ALTERNATIVE_COLUMNS = ("what-if", "accuracy", "cores", "latency", "objective", "plan")
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, the problem and solution it was made from, and alternatives."""

    plan: PipelinePlan
    problem: PlanningProblem
    solution: PlanSolution
    alternatives: Sequence[Alternative]

    @property
    def estimate(self) -> PlanEstimate:
        return plan_estimate(self.problem, self.solution)

    @property
    def spot_lines(self) -> list[str]:
        note = spot_note(self.solution, self.problem.spec)
        return [note] if note else []

    @property
    def sensitivities(self) -> list[Sensitivity]:
        return sensitivities(self.solution, partial(enlarge_batches, self.problem))


def plan_estimate(problem: PlanningProblem, solved: PlanSolution) -> PlanEstimate:
    return estimate(solved.program, enlarge_batches(problem, solved.program, solved.solution.choice))


def stage_rows(pipeline: InferencePipeline, plan: PipelinePlan) -> Rows:
    return [
        (
            stage.name,
            stage.variant,
            str(stage.batch_size),
            str(stage.all_replicas),
            f"{stage.all_cores:g}",
            f"{stage.accuracy:.4f} {accuracy_provenance(pipeline, stage)}",
            f"{stage.throughput_rps:.0f}",
            f"{1000 * stage.latency_seconds:.1f} ms",
        )
        for stage in plan.spec.stages
    ]


def point_rows(pipeline: InferencePipeline, plan: PipelinePlan) -> Rows:
    """Return a row of POINT_COLUMNS for each operating point of stages with several, preferred first."""
    return [
        _point_row(pipeline.spec.stage(stage.name), stage, point)
        for stage in plan.spec.stages
        if len(stage.points) > 1
        for point in stage.points
    ]


def _point_row(declared: Stage, stage: StagePlan, planned: PointPlan) -> tuple[str, ...]:
    variant, name = planned.key(stage.variant)
    point = declared.variant(variant).point(name)
    task_accuracies = ", ".join(f"{task} {accuracy:.4f}" for task, accuracy in planned.accuracy_by_task.items())
    seconds = (planned.service_seconds.get(size) for size in (1, stage.batch_size))
    return (
        stage.name,
        (name if planned.variant is None else f"{variant}/{name}") + (" (planned)" if planned == stage.planned else ""),
        f"{planned.accuracy:.4f} {point.measured_accuracy().evidence_label}"
        + (f" ({task_accuracies})" if task_accuracies else ""),
        *("–" if value is None else f"{1000 * value:.1f} ms" for value in seconds),
        "; ".join(point.knobs.values()),
    )


def accuracy_provenance(pipeline: InferencePipeline, stage: StagePlan) -> str:
    """Describe the evidence of a stage's accuracy: declared, published or measured, and the number of samples."""
    return (
        pipeline.spec.stage(stage.name)
        .variant(stage.variant)
        .point(stage.operating_point)
        .measured_accuracy()
        .evidence_label
    )


def explanation_lines(plan: PipelinePlan) -> list[str]:
    """Describe a plan's expected figures, its binding constraint, and its runner-up."""
    spec, explanation = plan.spec, plan.spec.explanation
    lines = []
    if spec.expected is not None:
        expected = spec.expected
        latency = f"latency {1000 * expected.latency_seconds:.1f} ms"
        more = _more_than_cores(expected.cores, expected.gpus, expected.cost_per_hour or expected.cores)
        lines.append(f"expected: accuracy {expected.accuracy:.4f}, {latency}, cores {expected.cores:g}{more}")
        costs = ", ".join(f"{flavor} {cost:.4g}" for flavor, cost in expected.cost_by_flavor.items() if cost)
        lines += [f"cost an hour: {costs}"] if costs else []
    lines += [f"{stage.name}: {describe_shares(stage.expected_rows)}" for stage in spec.stages if stage.shares]
    if explanation.accuracy_basis:
        lines.append(f"accuracies: {explanation.accuracy_basis}")
    if not spec.feasible:
        lines.append(f"not feasible: {spec.reason}; the plan serves {100 * spec.planned_fraction:.0f} % of the load")
    elif explanation.binding_constraint:
        lines.append(f"binding constraint: {explanation.binding_constraint}")
    if explanation.placement:
        lines.append(f"image encoding: {explanation.placement}")
    if explanation.runner_up is not None:
        stages = ", ".join(f"{stage}: {line}" for stage, line in explanation.runner_up.stages.items())
        lines.append(f"runner-up: {stages} (objective {explanation.runner_up.objective_loss:.4f} lower)")
    if explanation.solver:
        proof = "proven optimal" if explanation.gap <= 1e-6 else f"at most {explanation.gap:.3g} below the optimum"
        lines.append(f"solver: {explanation.solver}, {proof}")
    lines += [f"accuracy drift: {point}" for point in explanation.drifted_accuracies]
    lines += [f"batch size capped: {stage}" for stage in explanation.batch_sizes_capped]
    lines += [f"excluded: {point}" for point in explanation.excluded_points]
    return lines


def legend_lines(pipeline: InferencePipeline) -> list[str]:
    """Say what the figures of a plan mean: its objective, and its batch sizes."""
    objective = pipeline.spec.objective
    priced = any(v.resources.gpu for stage in pipeline.spec.stages for v in stage.variants) or pipeline.spec.flavors
    cost, lowest = ("cost an hour", "the lowest cost") if priced else ("cores", "the fewest cores")
    match objective.goal:
        case "Weighted":
            weights = f"{objective.accuracy_weight:g} × accuracy - {objective.cost_weight:g} × {cost}"
            meaning = f"{weights} - {objective.batch_weight:g} × the sum of the batch sizes; higher is better"
        case "MaxAccuracy":
            meaning = f"the highest accuracy that the budget allows, then {lowest}"
        case _:
            meaning = f"{lowest} with an accuracy of at least {objective.accuracy_floor:g}"
    largest = f"raised while the planned latency stays within {100 * SHARE_OF_SLO:g} % of the SLO"
    return [
        f"objective: {meaning}",
        f"batch size: the most rows that a replica computes at once; {largest}, so that bursts fit",
    ]


def sensitivity_rows(view: PlanView) -> Rows:
    current, program = view.estimate, view.solution.program
    rows: Rows = [("this plan", *_figures(current, None), "")]
    for sensitivity in view.sensitivities:
        if sensitivity.estimate is None:
            rows.append((sensitivity.change, "–", "–", "–", "–", sensitivity.reason))
        else:
            changes = _option_changes(program, current, sensitivity.estimate) or "none"
            rows.append((sensitivity.change, *_figures(sensitivity.estimate, current), changes))
    return rows


def alternative_rows(view: PlanView) -> Rows:
    current = view.estimate
    rows: Rows = [("this plan", *_figures(current, None), _options(view.problem, view.solution.program, current))]
    for alternative in view.alternatives:
        if alternative.solution is None:
            rows.append((alternative.name, "–", "–", "–", "–", alternative.reason))
            continue
        figures = plan_estimate(alternative.problem, alternative.solution)
        note = "" if alternative.solution.feasible else f" ({alternative.reason})"
        options = _options(alternative.problem, alternative.solution.program, figures)
        rows.append((alternative.name, *_figures(figures, current), options + note))
    return rows


def stage_tables(pipeline: InferencePipeline, plan: PipelinePlan, title: str = "") -> list[Table]:
    points = point_rows(pipeline, plan)
    tables = [terminal_table(STAGE_COLUMNS, stage_rows(pipeline, plan), title)]
    return [*tables, terminal_table(POINT_COLUMNS, points, "operating points, preferred first")] if points else tables


def plan_view_json(view: PlanView) -> dict[str, Any]:
    return {
        "plan": view.plan.model_dump(mode="json", by_alias=True, exclude_none=True),
        "sensitivities": [_estimate_json(s.change, s.estimate, s.reason) for s in view.sensitivities],
        "alternatives": [
            _estimate_json(
                alternative.name,
                None if alternative.solution is None else plan_estimate(alternative.problem, alternative.solution),
                alternative.reason,
            )
            for alternative in view.alternatives
        ],
    }


def _estimate_json(change: str, figures: PlanEstimate | None, reason: str) -> dict[str, Any]:
    if figures is None:
        return {"change": change, "reason": reason}
    names = ("accuracy", "cores", "gpus", "cost_per_hour", "latency_seconds", "objective")
    return {"change": change, "reason": reason, **{name: getattr(figures, name) for name in names}}


def _figures(figures: PlanEstimate, current: PlanEstimate | None) -> tuple[str, str, str, str]:
    """Accuracy, cores, latency and objective, with the difference from the current plan in parentheses."""
    base = figures if current is None else current
    milliseconds, base_milliseconds = 1000 * figures.latency_seconds, 1000 * base.latency_seconds
    more = _more_than_cores(figures.cores, figures.gpus, figures.cost_per_hour)
    return (
        f"{figures.accuracy:.4f}{_difference(figures.accuracy - base.accuracy, '+.4f')}",
        f"{figures.cores:g}{_difference(figures.cores - base.cores, '+.3g')}{more}",
        f"{milliseconds:.1f} ms{_difference(milliseconds - base_milliseconds, '+.1f')}",
        f"{figures.objective:.4f}{_difference(figures.objective - base.objective, '+.4f')}",
    )


def _more_than_cores(cores: float, gpus: int, cost: float) -> str:
    """GPUs, and the cost an hour unless it is the number of cores."""
    return (f" + {gpus} GPU" if gpus else "") + ("" if math.isclose(cost, cores) else f", {cost:.4g} an hour")


def _difference(value: float, spec: str) -> str:
    text = format(value, spec)
    return f" ({text})" if text.strip("+-0.") else ""


def _option_changes(program: Program, current: PlanEstimate, other: PlanEstimate) -> str:
    changes = []
    for stage, before, after in zip(program.stages, current.choice, other.choice, strict=True):
        old, new = describe_option(before), describe_option(after)
        if old != new:
            changes.append(f"{stage.name}: {old} → {new}")
    return "; ".join(changes)


def _options(problem: PlanningProblem, program: Program, figures: PlanEstimate) -> str:
    plans = [planned.plan for planned in planned_stages(problem, program, figures.choice).values()]
    return "; ".join(
        f"{plan.name}: {describe_shares(plan.expected_rows)} ×{plan.replicas} batch {plan.batch_size}"
        if plan.shares
        else f"{plan.name}: {describe_option(plan)}"
        for plan in plans
    )
