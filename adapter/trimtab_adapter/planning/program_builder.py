"""The ways to run a stage that are worth considering, and the program they make.

Per stage every variant × operating point × batch size, with the fewest replicas that carry the load; what is pinned,
bounded, not profiled, or more than one request to a replica can hold falls away. The option that runs now stays one,
even with more replicas than needed, and is the only one without the price of a change.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_adapter.planning.candidate import Candidate, candidates
from trimtab_adapter.planning.latency import backlog_seconds, planned_seconds, required_replicas
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.solvers.program import Option, Program, StageOptions, weights_of
from trimtab_pipelines.accuracy import interpolated_value, stage_values
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Which constraints to give up, for where not all can be kept."""

    fraction: float = 1.0
    """Of the load."""
    slo_seconds: float | None = None
    """In place of the pipeline's own."""
    floor: bool = False
    """Forget the accuracy floor."""
    sizes: bool = False
    """Forget pinned replicas and batch sizes."""
    pins: bool = False
    """Forget all pins."""


NOTHING = Relaxation()


def build_program(problem: PlanningProblem, relaxed: Relaxation = NOTHING) -> Program:
    """The program; raises PlanningError where a stage has no profile that any of its variants could use."""
    spec = problem.spec
    place = {stage.name: k for k, stage in enumerate(spec.ordered_stages)}
    return Program(
        stages=tuple(
            StageOptions(
                name=stage.name,
                predecessors=tuple(sorted({place[name] for name in predecessors(stage)})),
                options=tuple(_options(problem, stage, relaxed)),
            )
            for stage in spec.ordered_stages
        ),
        slo_seconds=problem.latency_target[1] if relaxed.slo_seconds is None else relaxed.slo_seconds,
        cores=spec.budget.cores,
        gpus=spec.budget.gpus,
        metric=spec.objective.accuracy_metric,
        weights=weights_of(spec.objective),
        accuracy_floor=0.0 if relaxed.floor else spec.objective.accuracy_floor or 0.0,
    )


def _pin(stage: Stage, relaxed: Relaxation) -> Pin:
    if relaxed.pins:
        return Pin()
    return stage.pin.model_copy(update={"replicas": None, "batch_size": None}) if relaxed.sizes else stage.pin


def _options(problem: PlanningProblem, stage: Stage, relaxed: Relaxation) -> Iterator[Option]:
    for candidate in candidates(problem, stage, _pin(stage, relaxed)):
        yield from _sizes(problem, stage, relaxed, candidate)
    if stage.name in problem.spec.encoders.values():
        yield _idle(problem, stage)


def _idle(problem: PlanningProblem, stage: Stage) -> Option:
    """No replicas: who would read what it encodes reads images itself."""
    running = problem.running(stage.name)
    variant = stage.variant(running.variant if running is not None else stage.pin.variant or stage.variants[0].name)
    return Option(
        variant=variant.name,
        operating_point=variant.points[0].name,
        batch_size=1,
        replicas=0,
        cores=0.0,
        gpus=0,
        accuracy=1.0,
        value=1.0,
        latency_seconds=0.0,
        throughput_rps=0.0,
        penalty=0.0 if running is None or not running.replicas else problem.spec.adaptation.switching_cost,
        disaggregated=False,
    )


def _apart(problem: PlanningProblem, stage: Stage, variant: Variant) -> bool | None:
    """Whether a variant is for images that are encoded apart; None where there is no such choice."""
    if stage.chooses_encoder_placement:
        return not variant.colocated
    return True if stage.name in problem.spec.encoders.values() else None


def _sizes(problem: PlanningProblem, stage: Stage, relaxed: Relaxation, candidate: Candidate) -> Iterator[Option]:
    """Yield the batch sizes of an operating point, each with its least replicas, and what runs now.

    The fastest point allowed must carry the busiest second, the planned one what keeps coming: so that it is the
    planned point's accuracy that most requests get, and nobody pays for replicas that a peak alone would need.
    """
    pin, running = _pin(stage, relaxed), problem.running(stage.name)
    if running is not None and not candidate.matches(running):
        running = None
    load_rps = problem.stage_rps(stage.name) * relaxed.fraction
    sustained_rps = problem.sustained_stage_rps(stage.name) * relaxed.fraction
    utilisation = problem.spec.adaptation.target_utilization
    for batch_size in batch_sizes(problem.spec, stage, pin):
        if batch_size > candidate.max_rows or not candidate.allowed[0].generates_in_time(batch_size, problem.spec.slo):
            continue
        least = max(
            required_replicas(load_rps, candidate.max_rps(batch_size), utilisation),
            required_replicas(sustained_rps, candidate.own.replica_rps(batch_size), utilisation),
            stage.min_replicas,
        )
        counts = {least} if pin.replicas is None else {pin.replicas}
        if running is not None and running.batch_size == batch_size and pin.replicas is None:
            counts.add(running.replicas)
        for replicas in sorted(counts):
            if least <= replicas <= stage.max_replicas:
                yield _option(problem, stage, candidate, batch_size, replicas, sustained_rps)


def batch_sizes(spec: InferencePipelineSpec, stage: Stage, pin: Pin) -> list[int]:
    """The batch sizes to choose from, ascending; none is larger than what the departure policy sends."""
    asked = stage.batch_sizes if pin.batch_size is None else (pin.batch_size,)
    most = _most_rows(spec, stage)
    return sorted({size if most is None else min(size, most) for size in asked})


def capped_batch_sizes(spec: InferencePipelineSpec) -> tuple[str, ...]:
    """Say of which stages batches are smaller than asked for, and why."""
    return tuple(
        f"{stage.name}: batches of {most} rows at most and not {largest}: {spec.scheduling_policy} sends no more"
        for stage in spec.stages
        for largest in [max(stage.batch_sizes if stage.pin.batch_size is None else (stage.pin.batch_size,))]
        for most in [_most_rows(spec, stage)]
        if most is not None and largest > most
    )


def _most_rows(spec: InferencePipelineSpec, stage: Stage) -> int | None:
    """Rows of a stage's largest batch; None where nothing bounds them. Rows that are written leave one by one."""
    return None if stage.generates else spec.policy_traits.max_batch_rows


def _option(
    problem: PlanningProblem, stage: Stage, candidate: Candidate, batch_size: int, replicas: int, sustained_rps: float
) -> Option:
    variant, point, escalation = candidate.variant, candidate.point, candidate.escalation
    quantile = problem.spec.slo.quantile
    carried_rps = replicas * candidate.own.replica_rps(batch_size)
    backlog = backlog_seconds(sustained_rps, carried_rps, quantile, problem.rows(stage.name))
    objective = problem.spec.objective
    if escalation is None:
        accuracy = point.measured_accuracy().on(objective.accuracy_basis)
        value = stage_values(stage, objective)[variant.name, point.name]
    else:
        accuracy, value = escalation.accuracy, interpolated_value(stage, objective, escalation.accuracy)
    return Option(
        variant=variant.name,
        operating_point=point.name,
        batch_size=batch_size,
        replicas=replicas,
        cores=replicas * variant.resources.cpu,
        gpus=replicas * variant.resources.gpu,
        accuracy=accuracy,
        value=value,
        latency_seconds=_latency_seconds(problem, stage, candidate, batch_size, replicas, backlog),
        throughput_rps=replicas * candidate.max_rps(batch_size),
        penalty=_penalty(problem, stage, candidate, batch_size, replicas),
        planned_escalation=escalation,
        disaggregated=_apart(problem, stage, variant),
    )


def _penalty(problem: PlanningProblem, stage: Stage, candidate: Candidate, batch_size: int, replicas: int) -> float:
    """What a change must gain; of fewer replicas of the same no more than a core is worth to the goal.

    To MaxAccuracy a core only breaks ties: what it cost to give one back would else keep a peak's replicas for ever.
    """
    running, objective = problem.running(stage.name), problem.spec.objective
    if running is None:
        return 0.0
    same = candidate.matches(running)
    if same and (batch_size, replicas) == (running.batch_size, running.replicas):
        return 0.0
    fewer = same and replicas < running.replicas
    worth = weights_of(objective).core / (objective.cost_weight or 1.0) if fewer else 1.0
    return problem.spec.adaptation.switching_cost * worth


def _latency_seconds(
    problem: PlanningProblem, stage: Stage, candidate: Candidate, batch_size: int, replicas: int, backlog: float
) -> float:
    """Of a row in a stage; who writes has a place for each of so many rows, and none waits for a batch to end."""
    quantile = problem.spec.slo.quantile
    service = candidate.own.seconds(batch_size, quantile)
    if stage.generates and problem.latency_target[0] == "slo.timeToFirstToken":
        return service + backlog
    transfer = stage.embedding_transfer_seconds if stage.encodes else 0.0
    return planned_seconds(service, replicas, backlog, quantile) + transfer
