"""Simulated replica set: applies a plan by the rollout rules of the runtimes, within the budget and its surge.

A replica takes seconds to start, and before them those of a new node of its flavor. A change within a replica group
starts nothing.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain, count

from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_adapter.simulation.transport import SimulatedReplica, SimulatedTransport
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.replica_groups import ReplicaGroup, group_of
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, Target, decide
from trimtab_pipelines.spec import InferencePipelineSpec


class SimulatedReplicaSet:
    """All replicas of a pipeline."""

    def __init__(
        self,
        stages: Mapping[str, SimulatedTransport],
        spec: InferencePipelineSpec,
        startup_seconds: float,
        events: EventQueue,
    ) -> None:
        self._stages = stages
        self._spec = spec
        self._limit_cores = spec.budget.cores + spec.budget.surge_cores
        self._startup_seconds = startup_seconds
        self._events = events
        self._members: dict[str, list[SimulatedReplica]] = {name: [] for name in stages}
        self._targets: list[tuple[str, ReplicaGroup, int]] = []
        self.cores = 0.0
        self.core_seconds = 0.0
        self.starts = 0
        self._counted_at = 0.0
        self._processors = count()

    def begin(self, plan: PipelinePlan) -> None:
        self._aim(plan)
        for name, group, replicas in self._targets:
            for _ in range(replicas):
                self._ready(self._add(name, group))

    def follow(self, plan: PipelinePlan) -> None:
        self._aim(plan)
        self.step()

    def step(self) -> None:
        kinds: dict[str, list[SimulatedReplica]] = {}
        for replica in chain.from_iterable(self._members.values()):
            kinds.setdefault(_kind(replica.stage, replica.group), []).append(replica)
        sets = [
            ReplicaGroupState.of(kind, alike[0].stage, Capacity(alike[0].group.cores), (r.state for r in alike))
            for kind, alike in kinds.items()
        ]
        targets = [
            Target(name, _kind(name, group), replicas, Capacity(group.cores)) for name, group, replicas in self._targets
        ]
        desired = decide(targets, sets, Capacity(self._limit_cores))
        for replica_set in sets:
            living = [replica for replica in kinds[replica_set.name] if replica.state != "draining"]
            living.sort(key=lambda replica: replica.state == "ready")
            for replica in living[: max(replica_set.desired - desired[replica_set.name], 0)]:
                self._release(replica)
        have = {each.name: each.desired for each in sets}
        for name, group, _ in self._targets:
            kind = _kind(name, group)
            for _ in range(desired[kind] - have.get(kind, 0)):
                self._begin_start(name, group)

    def lose_one(self, stage: str) -> None:
        """Kill the ready replica with the most batches, if there is one."""
        ready = [replica for replica in self._members[stage] if replica.state == "ready"]
        if ready:
            replica = max(ready, key=lambda r: len(r.in_flight))
            self._forget(replica)
            self._stages[stage].lose(replica)
            self.step()

    def remove_drained(self, replica: SimulatedReplica) -> None:
        """Remove a draining replica without batches."""
        self._forget(replica)
        self._stages[replica.stage].replicas.remove(replica)
        self._stages[replica.stage].look_around()
        replica.state = "gone"
        self._events.call_at(self._events.now, self.step)

    def settle(self) -> None:
        self.core_seconds += self.cores * (self._events.now - self._counted_at)
        self._counted_at = self._events.now

    def _aim(self, plan: PipelinePlan) -> None:
        self._targets = [
            (planned.name, group_of(self._stages[planned.name].stage, group.variant), group.replicas)
            for planned in plan.spec.stages
            for group in planned.groups
        ]

    def _begin_start(self, name: str, group: ReplicaGroup) -> None:
        replica = self._add(name, group)
        self.starts += 1
        node_seconds = self._spec.flavor(group.variants[0]).node_startup_seconds
        self._events.call_at(self._events.now + node_seconds + self._startup_seconds, partial(self._started, replica))

    def _add(self, name: str, group: ReplicaGroup) -> SimulatedReplica:
        replica = SimulatedReplica(name, group, processor=next(self._processors))
        self.settle()
        self.cores += group.cores
        self._members[name].append(replica)
        return replica

    def _started(self, replica: SimulatedReplica) -> None:
        if replica.state == "starting":
            self._ready(replica)
            self.step()

    def _ready(self, replica: SimulatedReplica) -> None:
        replica.become_ready()
        self._stages[replica.stage].replicas.append(replica)
        self._stages[replica.stage].look_around()

    def _release(self, replica: SimulatedReplica) -> None:
        """Drain a ready replica; remove a starting one."""
        if replica.state == "starting":
            replica.state = "gone"
            self._forget(replica)
            self._events.call_at(self._events.now, self.step)
            return
        replica.close("draining")
        self._stages[replica.stage].look_around()
        if not replica.in_flight:
            self.remove_drained(replica)

    def _forget(self, replica: SimulatedReplica) -> None:
        self.settle()
        self.cores -= replica.group.cores
        self._members[replica.stage].remove(replica)


def _kind(stage: str, group: ReplicaGroup) -> str:
    return f"{stage}: {group.name}"
