"""Program builder: turns a `PlanningProblem` into the options per stage and the integer program over them.

Each stage has one option per variant, operating point and batch size, with the fewest replicas that carry the load, and
options with fewer replicas that serve a part of the rows at a lighter point (`mixes`).
Options that are pinned away, out of bounds, not profiled, or larger than one request to a replica are left out. The
option that runs now stays available even with more replicas than needed, and is the only one without a switching cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab_adapter.planning.candidate import Candidate, candidates
from trimtab_adapter.planning.latency import backlog_seconds, planned_seconds, required_replicas
from trimtab_adapter.planning.mixes import Mix, mixes
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.solvers.program import Option, Program, StageOptions, objective_weights
from trimtab_pipelines.accuracy import interpolated_value, stage_values
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The constraints to drop."""

    fraction: float = 1.0
    """Share of the load to carry."""
    slo_seconds: float | None = None
    """Replaces the pipeline's SLO."""
    floor: bool = False
    """Drop the accuracy floor."""
    sizes: bool = False
    """Drop pinned replicas and batch sizes."""
    pins: bool = False
    """Drop all pins."""


NO_RELAXATION = Relaxation()


def build_program(problem: PlanningProblem, relaxed: Relaxation = NO_RELAXATION) -> Program:
    """Build the program. Raises PlanningError if a stage has no profile that any of its variants can use."""
    spec = problem.spec
    position = {stage.name: k for k, stage in enumerate(spec.ordered_stages)}
    return Program(
        stages=tuple(
            StageOptions(
                name=stage.name,
                predecessors=tuple(sorted({position[name] for name in predecessors(stage)})),
                options=tuple(_options(problem, stage, relaxed)),
            )
            for stage in spec.ordered_stages
        ),
        slo_seconds=problem.latency_target[1] if relaxed.slo_seconds is None else relaxed.slo_seconds,
        cores=spec.budget.cores,
        gpus=spec.budget.gpus,
        metric=spec.objective.accuracy_metric,
        weights=objective_weights(spec.objective),
        accuracy_floor=0.0 if relaxed.floor else spec.objective.accuracy_floor or 0.0,
    )


def _pin(stage: Stage, relaxed: Relaxation) -> Pin:
    if relaxed.pins:
        return Pin()
    return stage.pin.model_copy(update={"replicas": None, "batch_size": None}) if relaxed.sizes else stage.pin


def _options(problem: PlanningProblem, stage: Stage, relaxed: Relaxation) -> Iterator[Option]:
    found = list(candidates(problem, stage, _pin(stage, relaxed)))
    for candidate in found:
        yield from _sizes(problem, stage, relaxed, candidate)
    yield from _mixed_sizes(problem, stage, relaxed, found)
    if stage.name in problem.spec.encoders.values():
        yield _idle_option(problem, stage)


def _idle_option(problem: PlanningProblem, stage: Stage) -> Option:
    """The option without replicas, for an encoder whose generation stage has a colocated encoder."""
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


def _sizes(problem: PlanningProblem, stage: Stage, relaxed: Relaxation, candidate: Candidate) -> Iterator[Option]:
    """Yield the batch sizes of a candidate, each with its fewest replicas, and the current size.

    The fastest allowed operating point must carry the busiest second and the planned one the sustained load. Most
    requests then get the planned accuracy, and no replica is needed for a short peak alone.
    """
    pin, running = _pin(stage, relaxed), problem.running(stage.name)
    if running is not None and not candidate.matches(running):
        running = None
    load_rps = problem.stage_rps(stage.name) * relaxed.fraction
    sustained_rps = problem.sustained_stage_rps(stage.name) * relaxed.fraction
    utilisation = problem.spec.adaptation.target_utilization
    for batch_size in batch_sizes(problem.spec, stage, pin):
        if not _fits(problem, candidate, batch_size):
            continue
        fewest = max(
            required_replicas(load_rps, candidate.max_rps(batch_size), utilisation),
            required_replicas(sustained_rps, candidate.speed.replica_rps(batch_size), utilisation),
            stage.min_replicas,
        )
        counts = {fewest} if pin.replicas is None else {pin.replicas}
        if running is not None and running.batch_size == batch_size and pin.replicas is None:
            counts.add(running.replicas)
        for replicas in sorted(counts):
            if fewest <= replicas <= stage.max_replicas:
                yield _option(problem, stage, candidate, batch_size, replicas, sustained_rps)


def _mixed_sizes(
    problem: PlanningProblem, stage: Stage, relaxed: Relaxation, found: Sequence[Candidate]
) -> Iterator[Option]:
    """Yield mixes, with fewer replicas than the heavier half alone needs."""
    pin, running = _pin(stage, relaxed), problem.running(stage.name)
    load_rps = problem.stage_rps(stage.name) * relaxed.fraction
    sustained_rps = problem.sustained_stage_rps(stage.name) * relaxed.fraction
    for batch_size in batch_sizes(problem.spec, stage, pin):
        fitting = [candidate for candidate in found if _fits(problem, candidate, batch_size)]
        for mix, replicas in mixes(problem, fitting, batch_size, sustained_rps, running.replicas if running else 0):
            fewest = required_replicas(load_rps, mix.max_rps(batch_size), problem.spec.adaptation.target_utilization)
            in_bounds = max(fewest, stage.min_replicas) <= replicas <= stage.max_replicas
            if in_bounds and pin.replicas in {None, replicas}:
                yield _option(problem, stage, mix.heavier, batch_size, replicas, sustained_rps, mix=mix)


def _fits(problem: PlanningProblem, candidate: Candidate, batch_size: int) -> bool:
    in_time = candidate.allowed_speeds[0].generates_in_time(batch_size, problem.spec.slo)
    return batch_size <= candidate.speed.max_rows and in_time


def batch_sizes(spec: InferencePipelineSpec, stage: Stage, pin: Pin) -> list[int]:
    """The batch sizes to choose from, ascending; none exceeds the scheduling policy's limit."""
    sizes = stage.batch_sizes if pin.batch_size is None else (pin.batch_size,)
    limit = _max_rows(spec, stage)
    return sorted({size if limit is None else min(size, limit) for size in sizes})


def capped_batch_sizes(spec: InferencePipelineSpec) -> tuple[str, ...]:
    return tuple(
        f"{stage.name}: batches of at most {limit} rows instead of {largest}: the limit of {spec.policy_name}"
        for stage in spec.stages
        for largest in [max(stage.batch_sizes if stage.pin.batch_size is None else (stage.pin.batch_size,))]
        for limit in [_max_rows(spec, stage)]
        if limit is not None and largest > limit
    )


def _max_rows(spec: InferencePipelineSpec, stage: Stage) -> int | None:
    """Largest batch of a stage in rows; None if unlimited, as for generation stages, which do not batch rows."""
    return None if stage.generates else spec.policy_traits.max_batch_rows


def _option(
    problem: PlanningProblem,
    stage: Stage,
    candidate: Candidate,
    batch_size: int,
    replicas: int,
    sustained_rps: float,
    *,
    mix: Mix | None = None,
) -> Option:
    variant, point, escalation = candidate.variant, candidate.point, candidate.escalation
    quantile = problem.spec.slo.quantile
    # A mix turns lighter as a backlog grows.
    max_rps = candidate.max_rps(batch_size) if mix is None else mix.max_rps(batch_size)
    replica_rps = candidate.speed.replica_rps(batch_size) if mix is None else max_rps
    service = candidate.speed.seconds(batch_size, quantile) if mix is None else mix.seconds(batch_size, quantile)
    carried_rps = replicas * replica_rps
    backlog = backlog_seconds(sustained_rps, carried_rps, quantile, problem.rows(stage.name))
    objective, is_encoder = problem.spec.objective, stage.name in problem.spec.encoders.values()
    accuracy = candidate.accuracy if mix is None else mix.accuracy
    if escalation is None and mix is None:
        value = stage_values(stage, objective)[variant.name, point.name]
    else:
        value = interpolated_value(stage, objective, accuracy)
    return Option(
        variant=variant.name,
        operating_point=point.name,
        batch_size=batch_size,
        replicas=replicas,
        cores=replicas * variant.resources.cpu,
        gpus=replicas * variant.resources.gpu,
        accuracy=accuracy,
        value=value,
        latency_seconds=_latency_seconds(problem, stage, service, replicas, backlog),
        throughput_rps=replicas * max_rps,
        penalty=_penalty(problem, stage, candidate, batch_size, replicas),
        planned_escalation=escalation,
        mixed=mix is not None,
        least_accuracy=1.0 if mix is None else mix.lighter.point_accuracy,
        disaggregated=not variant.colocated if stage.chooses_encoder_placement else is_encoder or None,
    )


def _penalty(problem: PlanningProblem, stage: Stage, candidate: Candidate, batch_size: int, replicas: int) -> float:
    """Minimum gain required for a change. Fewer replicas of the same model cost at most the worth of one core.

    With MaxAccuracy a core only breaks ties: a full switching cost would keep the replicas of a peak forever.
    """
    running, objective = problem.running(stage.name), problem.spec.objective
    if running is None:
        return 0.0
    same = candidate.matches(running)
    if same and (batch_size, replicas) == (running.batch_size, running.replicas):
        return 0.0
    fewer = same and replicas < running.replicas
    gain_needed = objective_weights(objective).core / (objective.cost_weight or 1.0) if fewer else 1.0
    return problem.spec.adaptation.switching_cost * gain_needed


def _latency_seconds(problem: PlanningProblem, stage: Stage, service: float, replicas: int, backlog: float) -> float:
    """Planned latency of a row; a generation replica has a slot for each row, so it waits for no batch."""
    if stage.generates and problem.latency_target[0] == "slo.timeToFirstToken":
        return service + backlog
    transfer = stage.embedding_transfer_seconds if stage.encodes else 0.0
    return planned_seconds(service, replicas, backlog, problem.spec.slo.quantile) + transfer
