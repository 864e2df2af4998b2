"""The reasons a plan carries: what changed, what binds, what the next best plan would cost."""

from collections.abc import Sequence
from dataclasses import replace

from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program, Solution, models
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.plan import Explanation, PipelinePlan, RunnerUp, StagePlan
from trimtab_pipelines.spec import InferencePipelineSpec

_WORTH_SAYING = 1e-5
"""Of the objective: the smallest gain worth reporting; below it, only the tie-breaker δ moved."""


def explain(answer: PlanSolution, stages: Sequence[StagePlan], current: PipelinePlan | None, cause: str) -> Explanation:
    """Explain a solution against the plan before it."""
    return Explanation(
        change=_change(stages, current, cause),
        placement=encoder_placement(answer),
        binding_constraint=binding_constraint(answer),
        runner_up=runner_up(answer),
        solver=_solver(answer.solution),
        gap=answer.solution.gap,
    )


def accuracy_basis_note(spec: InferencePipelineSpec, stages: Sequence[StagePlan]) -> str:
    """Say what the accuracies of a plan are, and which are a value alone or no share of right answers."""
    running = {
        f"{stage.name}: {stage.variant}": spec.stage(stage.name)
        .variant(stage.variant)
        .point(stage.operating_point)
        .measured_accuracy()
        for stage in stages
    }
    agreeing = [name for name, accuracy in running.items() if accuracy.source == "Agreement"]
    unlabelled = f"; {AGREEMENT}, for want of right answers: {', '.join(agreeing)}" if agreeing else ""
    if spec.objective.accuracy_basis == "Expected":
        return f"expected values{unlabelled}"
    bare = [name for name, accuracy in running.items() if accuracy.low is None]
    without = f"; a value, for want of an interval: {', '.join(bare)}" if bare else ""
    return f"lower ends of 95 % intervals{without}{unlabelled}"


def _solver(solution: Solution) -> str:
    return f"{solution.solver} ({solution.note})" if solution.note else solution.solver


def describe_option(option: Option | StagePlan) -> str:
    """A short line such as `read-l ×2 batch 8`."""
    if not option.replicas:
        return "no replicas"
    point = "" if option.operating_point == "default" else f"/{option.operating_point}"
    again = "" if option.planned_escalation is None else f" > {option.planned_escalation}"
    return f"{option.variant}{point}{again} ×{option.replicas} batch {option.batch_size}"


def binding_constraint(answer: PlanSolution) -> str:
    """Name the constraint whose absence would gain most."""
    program, objective = answer.program, answer.solution.objective
    relaxations = {
        answer.latency_constraint: replace(program, slo_seconds=1e9),
        answer.cores_constraint: replace(program, cores=1e12),
        "objective.accuracyFloor": replace(program, accuracy_floor=0.0),
        answer.gpus_constraint: replace(program, gpus=10**9),
    }
    gains = {name: _gain(relaxed, program, objective) for name, relaxed in relaxations.items()}
    name = max(gains, key=lambda candidate: gains[candidate])
    if gains[name] > _WORTH_SAYING * max(1.0, abs(objective)):
        return f"{name}: without it the objective would gain {gains[name]:.4g}"
    return "none: no constraint keeps the objective from being better, only the weights do"


def _gain(relaxed: Program, program: Program, objective: float) -> float:
    if relaxed == program:
        return 0.0
    solution = solve(relaxed)
    return 0.0 if solution is None else solution.objective - objective


def runner_up(answer: PlanSolution) -> RunnerUp | None:
    """The best plan in which at least one stage runs another model, and what it would cost."""
    solution = answer.solution
    second = solve(replace(answer.program, other_than=models(solution.choice)))
    if second is None:
        return None
    named = zip(answer.program.stages, solution.choice, second.choice, strict=True)
    return RunnerUp(
        stages={stage.name: describe_option(other) for stage, option, other in named if other != option},
        objective_loss=max(0.0, solution.objective - second.objective),
    )


def encoder_placement(answer: PlanSolution) -> str:
    """Say whether images are encoded apart, and what the other way would cost; nothing where there is no choice."""
    program, solution = answer.program, answer.solution
    disaggregated = next((option.disaggregated for option in solution.choice if option.disaggregated is not None), None)
    if disaggregated is None or not program.has_placement_choice:
        return ""
    chosen, other = ("parted", "whole") if disaggregated else ("whole", "parted")
    elsewhere = program.with_placement(disaggregated=not disaggregated)
    if not all(stage.options for stage in elsewhere.stages):  # a pin leaves no choice
        return ""
    found = solve(elsewhere)
    if found is None:
        return f"{chosen}; {other}, no plan carries this load in time"
    lines = ", ".join(
        f"{stage.name} {describe_option(o)}" for stage, o in zip(program.stages, found.choice, strict=True)
    )
    return f"{chosen}; {other} ({lines}) the objective would be {solution.objective - found.objective:.4g} less"


def _change(stages: Sequence[StagePlan], current: PipelinePlan | None, cause: str) -> str:
    if current is None:
        return f"first plan, {cause}"
    before = {stage.name: stage for stage in current.spec.stages}
    moves = [
        f"{stage.name}: {describe_option(before[stage.name]) if stage.name in before else 'nothing'} → {describe_option(stage)}"
        for stage in stages
        if stage.name not in before or describe_option(before[stage.name]) != describe_option(stage)
    ]
    return f"{'; '.join(moves)} ({cause})" if moves else f"kept, {cause}"
