"""A decision in words and rows, for the terminal and for the page of `trimtab explain`. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from trimtab_adapter.planning.decide import with_enlarged_batches
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.planning.sensitivity import PlanEstimate, Sensitivity, estimate, sensitivities
from trimtab_adapter.planning.what_if import Alternative
from trimtab_adapter.solvers.program import Program
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import PipelinePlan, PointPlan, StagePlan
from trimtab_pipelines.spec import InferencePipeline

STAGE_COLUMNS = ("stage", "variant", "batch", "replicas", "cores", "accuracy", "rows/s it can serve", "latency")
POINT_COLUMNS = ("stage", "operating point", "accuracy", "one row", "full batch", "how it runs")
PRICE_COLUMNS = ("for", "accuracy", "cores", "latency", "objective", "what changes")
ALTERNATIVE_COLUMNS = ("if", "accuracy", "cores", "latency", "objective", "what would run")
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, the answer it was written from, and what was tried beside it."""

    plan: PipelinePlan
    problem: PlanningProblem
    solution: PlanSolution
    alternatives: Sequence[Alternative]

    @property
    def now(self) -> PlanEstimate:
        """The plan in figures."""
        return plan_estimate(self.problem, self.solution)

    @property
    def prices(self) -> list[Sensitivity]:
        """What a little more or less would take, as plans."""
        return sensitivities(self.solution, partial(with_enlarged_batches, self.problem))


def plan_estimate(question: PlanningProblem, found: PlanSolution) -> PlanEstimate:
    """The plan that an answer becomes, in figures."""
    return estimate(found.program, with_enlarged_batches(question, found.program, found.solution.choice))


def stage_rows(pipeline: InferencePipeline, plan: PipelinePlan) -> Rows:
    """What each stage runs; the columns are STAGE_COLUMNS. Each accuracy is told with what stands behind it."""
    return [
        (
            stage.name,
            stage.variant,
            str(stage.batch_size),
            str(stage.replicas),
            f"{stage.cores * stage.replicas:g}",
            f"{stage.accuracy:.4f} {accuracy_provenance(pipeline, stage)}",
            f"{stage.throughput_rps:.0f}",
            f"{1000 * stage.latency_seconds:.1f} ms",
        )
        for stage in plan.spec.stages
    ]


def point_rows(pipeline: InferencePipeline, plan: PipelinePlan) -> Rows:
    """Every point the router may run of each stage with several, preferred first; columns POINT_COLUMNS."""
    return [
        _point_row(pipeline.spec.stage(stage.name).variant(stage.variant).point(point.name), stage, point)
        for stage in plan.spec.stages
        if len(stage.points) > 1
        for point in stage.points
    ]


def _point_row(asked: OperatingPoint, stage: StagePlan, point: PointPlan) -> tuple[str, ...]:
    task_accuracies = ", ".join(f"{task} {accuracy:.4f}" for task, accuracy in point.accuracy_by_task.items())
    seconds = (point.service_seconds.get(size) for size in (1, stage.batch_size))
    return (
        stage.name,
        f"{point.name} (planned)" if point.name == stage.operating_point else point.name,
        f"{point.accuracy:.4f} {asked.measured_accuracy().evidence_label}"
        + (f" ({task_accuracies})" if task_accuracies else ""),
        *("–" if one is None else f"{1000 * one:.1f} ms" for one in seconds),
        "; ".join(asked.knobs.values()),
    )


def accuracy_provenance(pipeline: InferencePipeline, stage: StagePlan) -> str:
    """Say what stands behind a stage's accuracy: declared, published or measured, and on how many samples."""
    return (
        pipeline.spec.stage(stage.name)
        .variant(stage.variant)
        .point(stage.operating_point)
        .measured_accuracy()
        .evidence_label
    )


def explanation_lines(plan: PipelinePlan) -> list[str]:
    """Say what a plan is expected to give, what holds it back, and what comes second."""
    spec, why = plan.spec, plan.spec.explanation
    lines = []
    if spec.expected is not None:
        expected = spec.expected
        latency = f"latency {1000 * expected.latency_seconds:.1f} ms"
        gpus = f", GPUs {expected.gpus}" if expected.gpus else ""
        lines.append(f"expected: accuracy {expected.accuracy:.4f}, {latency}, cores {expected.cores:g}{gpus}")
    if why.accuracy_basis:
        lines.append(f"its accuracies are {why.accuracy_basis}")
    if not spec.feasible:
        lines.append(f"not feasible: {spec.reason}; it carries {100 * spec.planned_fraction:.0f} % of the load")
    elif why.binding_constraint:
        lines.append(f"held back by: {why.binding_constraint}")
    if why.placement:
        lines.append(f"images of chats: {why.placement}")
    if why.runner_up is not None:
        other = ", ".join(f"{stage}: {line}" for stage, line in why.runner_up.stages.items())
        lines.append(f"next best: {other} (objective {why.runner_up.objective_loss:.4f} less)")
    if why.solver:
        proof = "proven optimal" if why.gap <= 1e-6 else f"at most {why.gap:.3g} below the optimum"
        lines.append(f"solved by: {why.solver}, {proof}")
    lines += [f"no longer as accurate as measured: {point}" for point in why.drifted_accuracies]
    lines += [f"smaller batches than asked for: {stage}" for stage in why.batch_sizes_capped]
    lines += [f"left out: {point}" for point in why.excluded_points]
    return lines


def price_rows(decision: PlanView) -> Rows:
    """The plan and what a little more or less would take; the columns are PRICE_COLUMNS."""
    now, program = decision.now, decision.solution.program
    rows: Rows = [("this plan", *_figures(now, None), "")]
    for price in decision.prices:
        if price.estimate is None:
            rows.append((price.change, "–", "–", "–", "–", price.reason))
        else:
            changes = _changes(program, now, price.estimate) or "nothing: this plan gives it"
            rows.append((price.change, *_figures(price.estimate, now), changes))
    return rows


def alternative_rows(decision: PlanView) -> Rows:
    """The plan and the best one for each alternative; the columns are ALTERNATIVE_COLUMNS."""
    now = decision.now
    rows: Rows = [("as it is", *_figures(now, None), _choice(decision.solution.program, now))]
    for alternative in decision.alternatives:
        if alternative.solution is None:
            rows.append((alternative.name, "–", "–", "–", "–", alternative.reason))
            continue
        found = plan_estimate(alternative.problem, alternative.solution)
        note = "" if alternative.solution.feasible else f" ({alternative.reason})"
        rows.append((alternative.name, *_figures(found, now), _choice(alternative.solution.program, found) + note))
    return rows


def stage_tables(pipeline: InferencePipeline, plan: PipelinePlan, title: str = "") -> list[Table]:
    """What each stage runs and, where there are several, the operating points it may run at."""
    points = point_rows(pipeline, plan)
    tables = [terminal_table(STAGE_COLUMNS, stage_rows(pipeline, plan), title)]
    return [*tables, terminal_table(POINT_COLUMNS, points, "operating points, preferred first")] if points else tables


def terminal_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """A table for the terminal."""
    table = Table(*columns, box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup, which would eat an extra's [name]
    return table


def plan_view_json(decision: PlanView) -> dict[str, Any]:
    """Return the decision as JSON has it: the plan, what the next step would cost, and what was tried beside it."""
    return {
        "plan": decision.plan.model_dump(mode="json", by_alias=True, exclude_none=True),
        "prices": [_outlook_facts(price.change, price.estimate, price.reason) for price in decision.prices],
        "alternatives": [
            _outlook_facts(
                tried.name,
                None if tried.solution is None else plan_estimate(tried.problem, tried.solution),
                tried.reason,
            )
            for tried in decision.alternatives
        ],
    }


def _outlook_facts(what: str, found: PlanEstimate | None, reason: str) -> dict[str, Any]:
    if found is None:
        return {"what": what, "reason": reason}
    figures = ("accuracy", "cores", "gpus", "latency_seconds", "objective")
    return {"what": what, "reason": reason, **{name: getattr(found, name) for name in figures}}


def _figures(found: PlanEstimate, now: PlanEstimate | None) -> tuple[str, str, str, str]:
    """Accuracy, cores, latency and objective, with what differs from the plan in brackets."""
    before = found if now is None else now
    milliseconds, milliseconds_before = 1000 * found.latency_seconds, 1000 * before.latency_seconds
    gpus = f" + {found.gpus} GPU" if found.gpus else ""
    return (
        f"{found.accuracy:.4f}{_differs(found.accuracy - before.accuracy, '+.4f')}",
        f"{found.cores:g}{_differs(found.cores - before.cores, '+.3g')}{gpus}",
        f"{milliseconds:.1f} ms{_differs(milliseconds - milliseconds_before, '+.1f')}",
        f"{found.objective:.4f}{_differs(found.objective - before.objective, '+.4f')}",
    )


def _differs(by: float, form: str) -> str:
    written = format(by, form)
    return f" ({written})" if written.strip("+-0.") else ""


def _changes(program: Program, now: PlanEstimate, other: PlanEstimate) -> str:
    listed = zip(program.stages, now.choice, other.choice, strict=True)
    return "; ".join(
        f"{s.name}: {describe_option(a)} → {describe_option(b)}"
        for s, a, b in listed
        if describe_option(a) != describe_option(b)
    )


def _choice(program: Program, found: PlanEstimate) -> str:
    return "; ".join(
        f"{s.name}: {describe_option(option)}" for s, option in zip(program.stages, found.choice, strict=True)
    )
