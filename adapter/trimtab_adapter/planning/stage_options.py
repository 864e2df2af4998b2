"""Options of one stage: every candidate, mix and cascade with the replicas that carry the load.

Figures are computed as arrays over all options, since a stage has hundreds of them and more mixes of two groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.candidate import candidates
from trimtab_adapter.planning.group_mixes import group_mixes
from trimtab_adapter.planning.latency import (
    backlog_seconds,
    first_token_seconds,
    planned_seconds,
    required_replicas,
    slot_wait_seconds,
)
from trimtab_adapter.planning.mixes import Hulls, mixes, needed_replicas
from trimtab_adapter.planning.option_arrays import CandidateArrays, OptionArrays, answered_rows
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem, profiled_points
from trimtab_adapter.planning.point_speeds import Floats, Indices, PointSpeeds
from trimtab_adapter.solvers.option_table import PLACEMENTS, OptionFigures, OptionTable
from trimtab_adapter.solvers.program import Option, objective_weights
from trimtab_pipelines.accuracy import accuracy_values
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.plan import ReplicaGroupPlan, StagePlan
from trimtab_pipelines.replica_groups import ReplicaGroup, replica_groups
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant

_NO_FLAVORS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of options; arrays of shape [options]."""

    amounts: Floats
    """Of each limit; of shape [limits, options]."""
    accuracy: Floats
    latency_seconds: Floats
    throughput_rps: Floats


@dataclass(frozen=True, slots=True)
class StageBuilder:
    """What the options of one stage have in common."""

    problem: PlanningProblem
    stage: Stage
    pin: Pin
    running: StagePlan | None
    load_rps: float
    sustained_rps: float
    extra_seconds: float | None
    """Seconds beside queueing and service; None if rows wait for no batch."""
    candidates: CandidateArrays
    amounts: Floats
    """What one replica of each candidate requests, in the order of `Program.limits`; of shape [limits, candidates]."""

    @classmethod
    def of(cls, problem: PlanningProblem, stage: Stage, pin: Pin, sizes: Sequence[int], fraction: float) -> Self:
        """Raise PlanningError if the stage has no profile that any of its variants can use."""
        waits = not stage.generates or problem.latency_target[0] != "slo.timeToFirstToken"
        profiled = profiled_points(problem, stage)
        listed = candidates(problem, stage, pin, profiled)
        arrays = CandidateArrays.of(listed, PointSpeeds.of(problem, stage, profiled, sizes))
        amounts = {name: _amounts(problem.spec, group) for group in replica_groups(stage) for name in group.names}
        positions = {name: n for n, name in enumerate(amounts)}
        of_candidate = np.array([positions[each.variant.name] for each in listed], dtype=np.intp)
        return cls(
            problem,
            stage,
            pin,
            problem.running(stage.name),
            problem.stage_rps(stage.name) * fraction,
            problem.sustained_stage_rps(stage.name) * fraction,
            (stage.embedding_transfer_seconds if stage.encodes else 0.0) if waits else None,
            arrays,
            np.array([*amounts.values()]).T[:, of_candidate[arrays.number]],
        )

    def options(self) -> OptionTable:
        """Return the options, ascending by batch size."""
        traits, parts = self.problem.spec.policy_traits, [self._singles()]
        if traits.escalates and self.sustained_rps > 0:
            hulls = Hulls.of(self.candidates)
            needed = needed_replicas(self.problem.spec, self.sustained_rps, self.candidates.rps)
            parts.append(self._mixes(hulls, needed))
            if traits.shares_queues and self.pin.replicas is None and not self.stage.serves_one_variant:
                parts += [self._split_cascades(needed), self._group_mixes(hulls, needed)]
        found = OptionArrays.join(parts)
        found = found.take(np.argsort(self.candidates.batch_size[found.own], kind="stable"))
        table = self._table(found, self._figures(found))
        if self.stage.name in self.problem.spec.encoders.values():
            return table.with_option(_idle_option(self.problem, self.stage), [*self.problem.spec.flavor_limits])
        return table

    def _singles(self) -> OptionArrays:
        """Each candidate with its fewest replicas, for each length of queue, and with the current number.

        The planned operating point must carry the sustained load: most requests get the planned accuracy. Rows of the
        busiest second that even the fastest allowed point cannot carry wait, if `adaptation.peakWait` allows it.
        """
        arrays, running = self.candidates, self.running
        own = np.arange(arrays.number.size - arrays.split_second.size)
        most_seconds = (self.problem.spec.adaptation.peak_wait or 0.0) * self.problem.latency_target[1]
        counts = [self._fewest(own, share * most_seconds) for share in ((0.0, 0.5, 1.0) if most_seconds else (0.0,))]
        fewest = counts[-1]
        if self.pin.replicas is not None:
            counts = [np.full(own.size, float(self.pin.replicas))]
        elif running is not None:
            runs = self._same_models(running)[own] & (arrays.batch_size[own] == running.batch_size)
            counts.append(np.where(runs, float(running.replicas), fewest))
        bounds = {variant.name: self.stage.max_replicas_of(variant) for variant in self.stage.variants}
        most = np.array([bounds[name] for name in arrays.variants[own].tolist()])
        pairs = np.unique(np.stack((np.tile(own, len(counts)), np.concatenate(counts))), axis=1)
        own, replicas = pairs[0].astype(np.intp), pairs[1]
        found = OptionArrays(own, own, np.ones(own.size), replicas, np.zeros(own.size))
        return found.take((fewest[own] <= replicas) & (replicas <= most[own]))

    def _mixes(self, hulls: Hulls, needed: Floats) -> OptionArrays:
        """Mixes with fewer replicas than the heavier half alone needs."""
        found = mixes(hulls, needed, 0 if self.running is None else self.running.replicas)
        carries = self._required(self.load_rps, found.throughput_rps(self.candidates) / found.replicas)
        pinned = True if self.pin.replicas is None else found.replicas == self.pin.replicas
        return found.take(self._in_bounds(found.replicas) & (carries <= found.replicas) & pinned)

    def _split_cascades(self, needed: Floats) -> OptionArrays:
        """Cascades over two groups, each with its fewest replicas, and with the current numbers."""
        arrays, others = self.candidates, self.candidates.split_second
        own = np.arange(arrays.number.size - others.size, arrays.number.size)
        cascades = [arrays.candidate(n) for n in own.tolist()]
        shares = np.array([each.share for each in cascades])
        counts = np.maximum(np.ceil(shares * needed[others] - 1e-9), 1.0)
        found = OptionArrays(own, others, np.ones(own.size), self._fewest(own), counts)
        parts, running = [found], self.running
        if running is not None and len(running.groups) == 2:
            first, second = (float(group.replicas) for group in running.groups)
            same = np.array([each.escalation == running.planned_escalation for each in cascades], dtype=np.bool_)
            again = found.take(same & (found.replicas <= first) & (counts <= second))
            parts.append(again.with_replicas(first, second))
        found = OptionArrays.join(parts)
        return found.take(self._in_bounds(found.replicas + found.other_replicas))

    def _group_mixes(self, hulls: Hulls, needed: Floats) -> OptionArrays:
        peak_rps = self.load_rps / self.problem.spec.adaptation.target_utilization
        found = group_mixes(self.candidates, hulls, needed, peak_rps, self.running)
        carries = found.throughput_rps(self.candidates) > self.sustained_rps
        return found.take(carries & self._in_bounds(found.replicas + found.other_replicas))

    def _in_bounds(self, replicas: Floats) -> NDArray[np.bool_]:
        """Whether the stage may have so many replicas."""
        return (self.stage.min_replicas <= replicas) & (replicas <= self.stage.max_replicas)

    def _fewest(self, own: Indices, queue_seconds: float = 0.0) -> Floats:
        """The fewest replicas of candidates: at the fastest allowed point no row of the busiest second waits longer."""
        carrying = self._required(self.load_rps / (1.0 + queue_seconds), self.candidates.max_rps[own])
        sustained = self._required(self.sustained_rps, self.candidates.rps[own])
        return np.maximum(np.maximum(carrying, sustained), self.stage.min_replicas)

    def _required(self, load_rps: float, replica_rps: Floats) -> Floats:
        return required_replicas(load_rps, replica_rps, self.problem.spec.adaptation.target_utilization)

    def _same_models(self, running: StagePlan) -> NDArray[np.bool_]:
        """Whether each candidate is the running one, at any batch size."""
        same = [each.matches(running) for each in self.candidates.listed]
        return np.array(same, dtype=np.bool_)[self.candidates.number]

    def _figures(self, found: OptionArrays) -> _Figures:
        arrays, own, others = self.candidates, self.amounts[:, found.own], self.amounts[:, found.other]
        requested = own * found.replicas + others * found.other_replicas
        return _Figures(requested, found.accuracy(arrays), self._latency_seconds(found), found.throughput_rps(arrays))

    def _latency_seconds(self, found: OptionArrays) -> Floats:
        arrays, quantile = self.candidates, self.problem.spec.slo.quantile
        carried_rps = found.carried_rps(arrays)
        after_peak = self.load_rps / found.throughput_rps(arrays) - 1.0  # what the busiest second leaves
        if self.extra_seconds is None:
            slots = found.replicas * arrays.batch_size[found.own]
            wait = np.maximum(slot_wait_seconds(self.sustained_rps, carried_rps, slots, quantile), after_peak)
            first_seconds = np.maximum(self._first_seconds(found, found.own), self._first_seconds(found, found.other))
            # A chat waits for a slot, or for the prefill of others that found one with it.
            return np.asarray(np.maximum(first_seconds, wait + arrays.row_seconds[found.own]))
        backlog = backlog_seconds(self.sustained_rps, carried_rps, quantile, self.problem.rows(self.stage.name))
        wait = np.maximum(backlog, after_peak)
        return planned_seconds(found.seconds(arrays), found.least_replicas, wait, quantile) + self.extra_seconds

    def _first_seconds(self, found: OptionArrays, half: Indices) -> Floats:
        """Time to first token of chats that find a free slot at one of an option's candidates."""
        arrays = self.candidates
        utilisation = self.sustained_rps / (found.replicas * arrays.first_rps[half])
        row_seconds, seconds, sizes = arrays.row_seconds[half], arrays.seconds[half], arrays.batch_size[half]
        return first_token_seconds(row_seconds, seconds, sizes, utilisation, self.problem.spec.slo.quantile)

    def _table(self, found: OptionArrays, figures: _Figures) -> OptionTable:
        values = accuracy_values(self.stage, self.problem.spec.objective, figures.accuracy)
        sizes, placements = self.candidates.batch_size[found.own], self._placements()
        penalties = self._penalties(found, sizes)
        variants = self.candidates.variants[found.own].tolist()
        disaggregated = np.array([PLACEMENTS[placements[name]] for name in variants])
        read = OptionFigures(figures.latency_seconds, values, sizes, penalties, disaggregated, figures.amounts)
        flavors = tuple(self.problem.spec.flavor_limits)

        def create(n: int) -> Option:
            own, other, share = int(found.own[n]), int(found.other[n]), float(found.share[n])
            first, second = self.candidates.candidate(own), self.candidates.candidate(other)
            count = int(found.other_replicas[n])
            cores, gpus, cost, *used = figures.amounts[:, n].tolist()
            return Option(
                variant=first.variant.name,
                operating_point=first.point.name,
                batch_size=int(sizes[n]),
                replicas=int(found.replicas[n]),
                cores=cores,
                gpus=int(gpus),
                cost=cost,
                accuracy=float(figures.accuracy[n]),
                value=float(values[n]),
                latency_seconds=float(figures.latency_seconds[n]),
                throughput_rps=float(figures.throughput_rps[n]),
                penalty=float(penalties[n]),
                planned_escalation=first.escalation,
                other_groups=(_group_plan(second.variant, count),) if count else (),
                rows=partial(answered_rows, first, second, share) if count else None,
                mixed=share < 1.0,
                least_accuracy=1.0 if own == other else (second if share < 1.0 else first).point_accuracy,
                disaggregated=placements[first.variant.name],
                flavors=dict(zip(flavors, used, strict=True)) if flavors else _NO_FLAVORS,
            )

        return OptionTable(read, create)

    def _placements(self) -> dict[str, bool | None]:
        """Whether each variant requires disaggregated encoders."""
        if self.stage.chooses_encoder_placement:
            return {variant.name: not variant.colocated for variant in self.stage.variants}
        is_encoder = self.stage.name in self.problem.spec.encoders.values()
        return dict.fromkeys((variant.name for variant in self.stage.variants), is_encoder or None)

    def _penalties(self, found: OptionArrays, sizes: Floats) -> Floats:
        """Minimum gains required for a change. Fewer replicas of the same model cost at most the worth of one core.

        With MaxAccuracy the cost only breaks ties: a full switching cost would keep the replicas of a peak forever.
        """
        objective, running = self.problem.spec.objective, self.running
        if running is None:
            return np.zeros(found.own.size)
        beside = np.where(found.other_replicas > 0, self.candidates.variants[found.other], "")
        now_beside = ", ".join(group.variant for group in running.other_groups)
        same = self._same_models(running)[found.own] & (beside == now_beside)
        others = running.all_replicas - running.replicas
        counts = (found.replicas == running.replicas) & (found.other_replicas == others)
        unchanged = same & counts & (sizes == running.batch_size)
        fewer = same & (found.replicas + found.other_replicas < running.all_replicas)
        gain_needed = objective_weights(objective).cost / (objective.cost_weight or 1.0)
        gains = np.where(unchanged, 0.0, np.where(fewer, gain_needed, 1.0))
        return np.asarray(self.problem.spec.adaptation.switching_cost * gains)


def _amounts(spec: InferencePipelineSpec, group: ReplicaGroup) -> tuple[float, ...]:
    """What one replica requests, in the order of `Program.limits`; PlanningError if its flavor is unknown."""
    try:
        cost, capacity = group.cost_per_hour(spec), group.capacity
    except UserError as error:
        raise PlanningError(str(error)) from error
    return capacity.cores, capacity.gpus, cost, *(capacity.flavors.get(name, 0.0) for name in spec.flavor_limits)


def _group_plan(variant: Variant, replicas: int) -> ReplicaGroupPlan:
    return ReplicaGroupPlan(variant=variant.name, replicas=replicas, cores=variant.resources.cpu)


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
