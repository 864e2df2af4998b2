"""Explanation of a plan: the changes, the binding constraint, the encoder placement and the runner-up."""

import math
from collections.abc import Sequence
from dataclasses import replace

from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program, models
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.plan import Explanation, PipelinePlan, RunnerUp, StagePlan
from trimtab_pipelines.row_shares import describe_point
from trimtab_pipelines.spec import InferencePipelineSpec

_MIN_REPORTED_GAIN = 1e-5
"""Smallest gain reported, as a share of the objective; smaller gains only move the tie-breaker δ."""


def explain(
    solved: PlanSolution, stages: Sequence[StagePlan], routers: int, current: PipelinePlan | None, cause: str
) -> Explanation:
    return Explanation(
        change=_change(stages, routers, current, cause),
        placement=encoder_placement(solved),
        binding_constraint=binding_constraint(solved),
        runner_up=runner_up(solved),
        solver=f"{solved.solution.solver} ({solved.solution.note})" if solved.solution.note else solved.solution.solver,
        gap=solved.solution.gap,
    )


def accuracy_basis_note(spec: InferencePipelineSpec, stages: Sequence[StagePlan]) -> str:
    """Describe the basis of a plan's accuracies, and name those without an interval or with no labels."""
    running = {}
    for stage in stages:
        for variant, point, _ in stage.expected_rows:
            running[f"{stage.name}: {variant}"] = (
                spec.stage(stage.name).variant(variant).point(point).measured_accuracy()
            )
    agreeing = [name for name, accuracy in running.items() if accuracy.source == "Agreement"]
    unlabelled = f"; {AGREEMENT}, without labels: {', '.join(agreeing)}" if agreeing else ""
    if spec.objective.accuracy_basis == "Expected":
        return f"as declared or measured, without their intervals{unlabelled}"
    bare = [name for name, accuracy in running.items() if accuracy.low is None]
    without = f"; values without an interval: {', '.join(bare)}" if bare else ""
    return f"lower bounds of 95 % intervals{without}{unlabelled}"


def describe_option(option: Option | StagePlan) -> str:
    """A short description such as `read-l ×2 batch 8`."""
    if not option.replicas:
        return "no replicas"
    escalation = "" if option.planned_escalation is None else f", {option.planned_escalation}"
    others = "".join(f" + {group.variant} ×{group.replicas}" for group in option.other_groups)
    point = describe_point(option.variant, option.operating_point)
    return f"{point}{escalation} ×{option.replicas}{others} batch {option.batch_size}"


def binding_constraint(solved: PlanSolution) -> str:
    """Name the constraint whose removal would gain most."""
    program, objective = solved.program, solved.solution.objective
    relaxations = {
        solved.latency_constraint: replace(program, slo_seconds=1e9),
        solved.cores_constraint: replace(program, cores=1e12),
        "objective.accuracyFloor": replace(program, accuracy_floor=0.0),
        solved.gpus_constraint: replace(program, gpus=10**9),
        "budget.costPerHour": replace(program, cost=math.inf),
    }
    for name, _ in program.flavors:
        without = tuple((each, math.inf if each == name else limit) for each, limit in program.flavors)
        relaxations[f"limit of flavor {name}"] = replace(program, flavors=without)
    gains = {name: _gain(relaxed, program, objective) for name, relaxed in relaxations.items()}
    name = max(gains, key=lambda candidate: gains[candidate])
    if gains[name] > _MIN_REPORTED_GAIN * max(1.0, abs(objective)):
        return f"{name}: without it the objective would gain {gains[name]:.4g}"
    return "none: no looser limit would allow a better plan"


def _gain(relaxed: Program, program: Program, objective: float) -> float:
    if relaxed == program:
        return 0.0
    solution = solve(relaxed)
    return 0.0 if solution is None else solution.objective - objective


def runner_up(solved: PlanSolution) -> RunnerUp | None:
    """The best plan in which at least one stage runs another model, and its objective loss."""
    solution = solved.solution
    second = solve(replace(solved.program, other_than=models(solution.choice)))
    if second is None:
        return None
    named = zip(solved.program.stages, solution.choice, second.choice, strict=True)
    return RunnerUp(
        stages={stage.name: describe_option(other) for stage, option, other in named if other != option},
        objective_loss=max(0.0, solution.objective - second.objective),
    )


def encoder_placement(solved: PlanSolution) -> str:
    """Compare the chosen encoder placement, colocated or disaggregated, to the other; empty without a choice."""
    program, solution = solved.program, solved.solution
    disaggregated = next((option.disaggregated for option in solution.choice if option.disaggregated is not None), None)
    if disaggregated is None or not program.has_placement_choice:
        return ""
    chosen, other = ("disaggregated", "colocated") if disaggregated else ("colocated", "disaggregated")
    alternative = program.with_placement(disaggregated=not disaggregated)
    if not all(stage.options for stage in alternative.stages):  # a pin leaves no choice
        return ""
    best = solve(alternative)
    if best is None:
        return f"{chosen}; {other}: no plan carries this load within the SLO"
    lines = ", ".join(
        f"{stage.name} {describe_option(o)}" for stage, o in zip(program.stages, best.choice, strict=True)
    )
    return f"{chosen}; {other} ({lines}): the objective would be {solution.objective - best.objective:.4g} lower"


def _change(stages: Sequence[StagePlan], routers: int, current: PipelinePlan | None, cause: str) -> str:
    if current is None:
        return f"first plan, {cause}"
    previous = {stage.name: describe_option(stage) for stage in current.spec.stages}
    moves = [
        f"{stage.name}: {previous.get(stage.name, 'nothing')} → {describe_option(stage)}"
        for stage in stages
        if previous.get(stage.name) != describe_option(stage)
    ]
    if routers != current.spec.routers:
        moves.append(f"routers: {current.spec.routers} → {routers}")
    return f"{'; '.join(moves)} ({cause})" if moves else f"unchanged, {cause}"
