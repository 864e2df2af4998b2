"""Program builder: turns a `PlanningProblem` into the options per stage and the integer program over them.

Each stage has one option per variant, operating point and batch size, with the fewest replicas that carry the load, and
options with fewer replicas that serve a part of the rows at a lighter point (`mixes`).
Options that are pinned away, out of bounds, not profiled, or larger than one request to a replica are left out. The
option that runs now stays available even with more replicas than needed, and is the only one without a switching cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.candidate import SizedCandidate, candidates
from trimtab_adapter.planning.group_mixes import GroupMixes, SplitCascade, group_mixes, split_cascades
from trimtab_adapter.planning.latency import backlog_seconds, planned_seconds, required_replicas, served_backlog
from trimtab_adapter.planning.mixes import Mix, mixes
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.program import Option, Program, StageOptions, objective_weights
from trimtab_pipelines.accuracy import accuracy_values
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.plan import ReplicaGroupPlan, StagePlan
from trimtab_pipelines.replica_groups import ReplicaGroup, replica_groups
from trimtab_pipelines.rollout import Capacity
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
                options=tuple(_StageBuilder.of(problem, stage, relaxed).options()),
            )
            for stage in spec.ordered_stages
        ),
        slo_seconds=problem.latency_target[1] if relaxed.slo_seconds is None else relaxed.slo_seconds,
        cores=spec.budget.cores,
        gpus=spec.budget.gpus,
        metric=spec.objective.accuracy_metric,
        weights=objective_weights(spec.objective),
        accuracy_floor=0.0 if relaxed.floor else spec.objective.accuracy_floor or 0.0,
        cost=inf if spec.budget.cost_per_hour is None else spec.budget.cost_per_hour,
        flavors=tuple(spec.flavor_limits.items()),
    )


def _pin(stage: Stage, relaxed: Relaxation) -> Pin:
    if relaxed.pins:
        return Pin()
    return stage.pin.model_copy(update={"replicas": None, "batch_size": None}) if relaxed.sizes else stage.pin


@dataclass(frozen=True, slots=True)
class _Request:
    """Resources that replicas request, and their cost an hour."""

    capacity: Capacity
    cost: float

    @classmethod
    def of(cls, spec: InferencePipelineSpec, group: ReplicaGroup) -> Self:
        """Of one replica; PlanningError if its flavor is unknown."""
        try:
            return cls(group.capacity, group.cost_per_hour(spec))
        except UserError as error:
            raise PlanningError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _StageBuilder:
    """What the options of one stage have in common."""

    problem: PlanningProblem
    stage: Stage
    pin: Pin
    running: StagePlan | None
    load_rps: float
    sustained_rps: float
    rows_together: float
    value: Callable[[float], float]
    extra_seconds: float | None
    """Seconds beside queueing and service; None if rows wait for no batch."""
    is_encoder: bool
    chooses_placement: bool
    requests: Mapping[str, _Request]
    """Of one replica, by variant."""
    limited: tuple[str, ...]
    """Resource flavors with a limit."""
    amounts: Mapping[str, tuple[float, ...]]
    """Cores, GPUs, cost and devices of each limited flavor of one replica, by variant."""

    @classmethod
    def of(cls, problem: PlanningProblem, stage: Stage, relaxed: Relaxation) -> Self:
        groups = [(group, _Request.of(problem.spec, group)) for group in replica_groups(stage)]
        requests = {variant.name: request for group, request in groups for variant in group.variants}
        limited = tuple(problem.spec.flavor_limits)
        waits = not stage.generates or problem.latency_target[0] != "slo.timeToFirstToken"
        return cls(
            problem,
            stage,
            _pin(stage, relaxed),
            problem.running(stage.name),
            problem.stage_rps(stage.name) * relaxed.fraction,
            problem.sustained_stage_rps(stage.name) * relaxed.fraction,
            problem.rows(stage.name),
            accuracy_values(stage, problem.spec.objective),
            (stage.embedding_transfer_seconds if stage.encodes else 0.0) if waits else None,
            stage.name in problem.spec.encoders.values(),
            stage.chooses_encoder_placement,
            requests,
            limited,
            {
                name: (c.cores, c.gpus, request.cost, *(c.flavors.get(flavor, 0.0) for flavor in limited))
                for name, request in requests.items()
                for c in [request.capacity]
            },
        )

    def options(self) -> Iterator[Option]:
        sizes, slo = batch_sizes(self.problem.spec, self.stage, self.pin), self.problem.spec.slo
        found = [
            sized
            for candidate in candidates(self.problem, self.stage, self.pin)
            for size in sizes
            if (sized := candidate.sized(size, slo)) is not None
        ]
        for size in sizes:
            of_size = [sized for sized in found if sized.batch_size == size]
            options = [option for sized in of_size for option in self._sizes(sized)]
            options += self._mixed_sizes(of_size)
            yield from options
            if self.pin.replicas is None and not self.stage.serves_one_variant:
                yield from self._two_groups(of_size, options)
        if self.is_encoder:
            yield _idle_option(self.problem, self.stage)

    def _sizes(self, sized: SizedCandidate) -> Iterator[Option]:
        """Yield a candidate with its fewest replicas, and with the current number.

        The fastest allowed operating point must carry the busiest second and the planned one the sustained load. Most
        requests then get the planned accuracy, and no replica is needed for a short peak alone.
        """
        fewest = max(self._carrying(sized), self._required(self.sustained_rps, sized.replica_rps))
        counts, running = [self.pin.replicas or fewest], self.running
        if running is not None and running.batch_size == sized.batch_size and self.pin.replicas is None:
            counts = sorted({fewest, running.replicas}) if sized.candidate.matches(running) else counts
        for replicas in counts:
            if fewest <= replicas <= self.stage.max_replicas_of(sized.candidate.variant):
                yield self._option(sized, replicas)

    def _mixed_sizes(self, found: Sequence[SizedCandidate]) -> Iterator[Option]:
        """Yield mixes, with fewer replicas than the heavier half alone needs."""
        running = self.running.replicas if self.running else 0
        for mix in mixes(self.problem, found, self.sustained_rps, running):
            fewest = self._required(self.load_rps, max(mix.heavier.max_rps, mix.lighter.max_rps))
            in_bounds = max(fewest, self.stage.min_replicas) <= mix.replicas <= self.stage.max_replicas
            if in_bounds and self.pin.replicas in {None, mix.replicas}:
                yield self._option(mix.heavier, mix.replicas, mix)

    def _two_groups(self, found: Sequence[SizedCandidate], others: Sequence[Option]) -> Iterator[Option]:
        """Yield options of two replica groups that no other one beats in resources, latency and accuracy.

        `others` are options of one group. Those with the current variants stay: they cost no change.
        """
        for cascade in self._split_cascades(found):
            if self._in_bounds(cascade.replicas + cascade.other_replicas):
                yield self._option(cascade.own, cascade.replicas, cascade)
        mixed = group_mixes(self.problem, found, self.load_rps, self.sustained_rps, self.running)
        if mixed is None:
            return
        carries = mixed.throughput_rps > self.sustained_rps
        mixed = mixed.take(carries & self._in_bounds(mixed.replicas + mixed.other_replicas))
        each = np.array([self.amounts[sized.candidate.variant.name] for sized in found]).T
        amounts = each[:, mixed.heavier] * mixed.replicas + each[:, mixed.lighter] * mixed.other_replicas
        figures = np.vstack((amounts, self._mixed_seconds(mixed), -mixed.accuracy))
        rivals = np.array([self._figures(option) for option in others]).reshape(-1, len(figures)).T
        kept = undominated([*np.hstack((figures, rivals))])
        for index in sorted({*kept[kept < mixed.share.size].tolist(), *self._current(mixed)}):
            mix = mixed.mix(index)
            yield self._option(mix.own, mix.replicas, mix)

    def _in_bounds(self, replicas: Any) -> Any:
        """Whether the stage may have so many replicas; a number or an array."""
        return (self.stage.min_replicas <= replicas) & (replicas <= self.stage.max_replicas)

    def _mixed_seconds(self, mixed: GroupMixes) -> NDArray[np.float64]:
        """Planned latency, as `_latency_seconds`."""
        quantile = self.problem.spec.slo.quantile
        backlog = served_backlog(self.sustained_rps, mixed.throughput_rps, quantile, self.rows_together)
        if self.extra_seconds is None:
            return np.asarray(mixed.seconds + backlog)
        fewest = np.minimum(mixed.replicas, mixed.other_replicas)
        return np.asarray(planned_seconds(mixed.seconds, fewest, backlog, quantile) + self.extra_seconds)

    def _figures(self, option: Option) -> tuple[float, ...]:
        """Resources, latency and accuracy of an option; smaller is better."""
        limited = [option.flavors.get(name, 0.0) for name in self.limited]
        return option.cores, option.gpus, option.cost, *limited, option.latency_seconds, -option.accuracy

    def _current(self, mixed: GroupMixes) -> list[int]:
        """Mixes of the variants that run now."""
        if self.running is None or not self.running.other_groups:
            return []
        names = [sized.candidate.variant.name for sized in mixed.candidates]
        now = self.running.variant, self.running.other_groups[0].variant
        pairs = zip(mixed.heavier, mixed.lighter, strict=True)
        return [n for n, (heavier, lighter) in enumerate(pairs) if (names[heavier], names[lighter]) == now]

    def _requested(self, sized: SizedCandidate, replicas: int, mix: Mix | SplitCascade | None) -> _Request:
        """What all replicas of an option request together."""
        own = self.requests[sized.candidate.variant.name]
        if mix is None or not mix.other_replicas:
            return _Request(own.capacity.times(replicas), own.cost * replicas)
        other, count = self.requests[mix.other.candidate.variant.name], mix.other_replicas
        capacity = own.capacity.times(replicas) + other.capacity.times(count)
        return _Request(capacity, own.cost * replicas + other.cost * count)

    def _split_cascades(self, found: Sequence[SizedCandidate]) -> Iterator[SplitCascade]:
        """Yield cascades over two groups, each with its fewest replicas, and with the current numbers."""
        running = self.running
        for cascade in split_cascades(self.problem, found, self.sustained_rps):
            fewest = max(self._carrying(cascade.first), self._required(self.sustained_rps, cascade.first.replica_rps))
            yield replace(cascade, replicas=fewest)
            if running is not None and running.planned_escalation == cascade.escalation:
                counts = [group.replicas for group in running.groups]
                if len(counts) == 2 and counts[0] >= fewest and counts[1] >= cascade.other_replicas:
                    yield replace(cascade, replicas=counts[0], other_replicas=counts[1])

    def _carrying(self, sized: SizedCandidate) -> int:
        """The fewest replicas that carry the busiest second at the fastest allowed point."""
        return max(self._required(self.load_rps, sized.max_rps), self.stage.min_replicas)

    def _required(self, load_rps: float, replica_rps: float) -> int:
        return required_replicas(load_rps, replica_rps, self.problem.spec.adaptation.target_utilization)

    def _option(self, sized: SizedCandidate, replicas: int, mix: Mix | SplitCascade | None = None) -> Option:
        candidate, batch_size = sized.candidate, sized.batch_size
        variant, accuracy = candidate.variant, candidate.accuracy if mix is None else mix.accuracy
        other_groups = () if mix is None else _other_groups(mix)
        escalation = candidate.escalation if mix is None else mix.escalation
        requested = self._requested(sized, replicas, mix)
        return Option(
            variant=variant.name,
            operating_point=candidate.point.name,
            batch_size=batch_size,
            replicas=replicas,
            cores=requested.capacity.cores,
            gpus=requested.capacity.gpus,
            cost=requested.cost,
            flavors=requested.capacity.flavors,
            accuracy=accuracy,
            value=self.value(accuracy),
            latency_seconds=self._latency_seconds(sized, replicas, mix),
            throughput_rps=replicas * sized.max_rps if mix is None else mix.throughput_rps,
            penalty=self._penalty(sized, replicas, escalation, other_groups) if self.running else 0.0,
            planned_escalation=escalation,
            other_groups=other_groups,
            rows=mix.rows if mix is not None and other_groups else None,
            least_accuracy=1.0 if mix is None else mix.least_accuracy,
            mixed=isinstance(mix, Mix),
            disaggregated=not variant.colocated if self.chooses_placement else self.is_encoder or None,
        )

    def _penalty(
        self,
        sized: SizedCandidate,
        replicas: int,
        escalation: EscalationPlan | None,
        others: tuple[ReplicaGroupPlan, ...],
    ) -> float:
        """Minimum gain required for a change. Fewer replicas of the same model cost at most the worth of one core.

        With MaxAccuracy the cost only breaks ties: a full switching cost would keep the replicas of a peak forever.
        """
        running, objective = self.running, self.problem.spec.objective
        if running is None:
            return 0.0
        model = *sized.key, escalation, [group.variant for group in others]
        same = model == (
            running.variant,
            running.operating_point,
            running.planned_escalation,
            [group.variant for group in running.other_groups],
        )
        counts = sized.batch_size, replicas, *(group.replicas for group in others)
        if same and counts == (running.batch_size, *(group.replicas for group in running.groups)):
            return 0.0
        fewer = same and replicas + sum(group.replicas for group in others) < running.all_replicas
        gain_needed = objective_weights(objective).cost / (objective.cost_weight or 1.0) if fewer else 1.0
        return self.problem.spec.adaptation.switching_cost * gain_needed

    def _latency_seconds(self, sized: SizedCandidate, replicas: int, mix: Mix | SplitCascade | None) -> float:
        """Planned latency of a row; a generation replica has a slot for each row, so it waits for no batch."""
        quantile = self.problem.spec.slo.quantile
        # A mix turns lighter as a backlog grows.
        seconds, carried_rps = (
            (sized.seconds, replicas * sized.replica_rps) if mix is None else (mix.seconds, mix.throughput_rps)
        )
        backlog = backlog_seconds(self.sustained_rps, carried_rps, quantile, self.rows_together)
        if self.extra_seconds is None:
            return seconds + backlog
        fewest = replicas if mix is None else min(replicas, mix.other_replicas or replicas)
        return planned_seconds(seconds, fewest, backlog, quantile) + self.extra_seconds


def _other_groups(mix: Mix | SplitCascade) -> tuple[ReplicaGroupPlan, ...]:
    variant = mix.other.candidate.variant
    if not mix.other_replicas:
        return ()
    return (ReplicaGroupPlan(variant=variant.name, replicas=mix.other_replicas, cores=variant.resources.cpu),)


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
        cost=0.0,
        accuracy=1.0,
        value=1.0,
        latency_seconds=0.0,
        throughput_rps=0.0,
        penalty=0.0 if running is None or not running.replicas else problem.spec.adaptation.switching_cost,
        disaggregated=False,
    )


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
