"""Which replicas there are: a plan becomes true make-before-break, within the budget and its surge.

The rules of the runtimes, for replicas that take some seconds to start: a new hosting group is started and ready before
the old one drains; a change within a group starts nothing; where there is no room, replica by replica, and a stage
loses its last one only where nothing else could ever make room.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

from trimtab_adapter.simulation.agenda import Agenda
from trimtab_adapter.simulation.carrier import DrawnCarrier
from trimtab_adapter.simulation.replica import SimulatedReplica
from trimtab_pipelines.hosting import HostingGroup, group_of
from trimtab_pipelines.plan import PipelinePlan

_TOLERANCE = 1e-9


class Fleet:
    """All replicas of a pipeline.

    Args:
        stages: whose replicas they are, by name.
        limit_cores: most cores all replicas may have.
        startup_seconds: from a start until it is ready.
        agenda: the clock.
    """

    def __init__(
        self, stages: Mapping[str, DrawnCarrier], limit_cores: float, startup_seconds: float, agenda: Agenda
    ) -> None:
        self._stages = stages
        self._limit_cores = limit_cores
        self._startup_seconds = startup_seconds
        self._agenda = agenda
        self._members: dict[str, list[SimulatedReplica]] = {name: [] for name in stages}
        self._targets: dict[str, tuple[HostingGroup, int]] = {}
        self.cores = 0.0
        self.core_seconds = 0.0
        self.starts = 0
        self._counted_at = 0.0
        self._processors = count()

    def begin(self, plan: PipelinePlan) -> None:
        """Have the first plan's replicas ready at once."""
        self._aim(plan)
        for name, (group, replicas) in self._targets.items():
            for _ in range(replicas):
                self._ready(self._add(name, group))

    def follow(self, plan: PipelinePlan) -> None:
        """Make another plan true."""
        self._aim(plan)
        self.step()

    def step(self) -> None:
        """Do what is next, whatever is true now."""
        unmet = [name for name in self._targets if not self._bring_up(name)]
        for name in self._targets:
            self._retire(name)
        if unmet and not self._under_way():
            self._make_room(unmet)

    def lose_one(self, stage: str) -> bool:
        """Let the ready replica that has batches, or else any, die; False where there is none."""
        ready = [replica for replica in self._members[stage] if replica.state == "ready"]
        if not ready:
            return False
        replica = max(ready, key=lambda r: r.inflight)
        self._forget(replica)
        self._stages[stage].lose(replica)
        self.step()
        return True

    def ended(self, replica: SimulatedReplica) -> None:
        """A replica that drained has no batch left."""
        self._forget(replica)
        self._stages[replica.stage].replicas.remove(replica)
        self._stages[replica.stage].look_around()
        replica.state = "gone"
        self._agenda.at(self._agenda.now, self.step)

    def settle(self) -> None:
        """Count the cores reserved until now."""
        self.core_seconds += self.cores * (self._agenda.now - self._counted_at)
        self._counted_at = self._agenda.now

    def _aim(self, plan: PipelinePlan) -> None:
        for planned in plan.spec.stages:
            group = group_of(self._stages[planned.name].stage, planned.variant)
            self._targets[planned.name] = (group, planned.replicas)

    def _living(self, stage: str) -> list[SimulatedReplica]:
        return [replica for replica in self._members[stage] if replica.state in {"starting", "ready"}]

    def _bring_up(self, name: str) -> bool:
        """Start what is missing, as far as there is room; tell whether nothing is missing any more."""
        group, wanted = self._targets[name]
        missing = wanted - sum(replica.group == group for replica in self._living(name))
        while missing > 0 and group.cores <= self._limit_cores - self.cores + _TOLERANCE:
            replica = self._add(name, group)
            self.starts += 1
            self._agenda.at(self._agenda.now + self._startup_seconds, partial(self._started, replica))
            missing -= 1
        return missing <= 0

    def _retire(self, name: str) -> None:
        """Let go of replicas beyond the number asked for, and of other groups once enough of this one are ready."""
        group, wanted = self._targets[name]
        own = [replica for replica in self._living(name) if replica.group == group]
        own.sort(key=lambda replica: replica.state == "ready")
        for replica in own[: max(len(own) - wanted, 0)]:
            self._release(replica)
        ready = sum(replica.state == "ready" for replica in own)
        for replica in self._living(name):
            if replica.group != group and (ready >= wanted or replica.state == "starting"):
                self._release(replica)

    def _under_way(self) -> bool:
        """Whether room may yet come of itself."""
        return any(
            replica.state in {"starting", "draining"} for members in self._members.values() for replica in members
        )

    def _make_room(self, unmet: Sequence[str]) -> None:
        """Give up one replica of another group: of a stage that has more, else one whose place its heir can take."""
        stale = [r for name in unmet for r in self._living(name) if r.group != self._targets[name][0]]
        spare = [replica for replica in stale if len(self._living(replica.stage)) > 1]
        heirs = [r for r in stale if r.group.cores + self._limit_cores - self.cores >= self._targets[r.stage][0].cores]
        for replica in (spare or heirs)[:1]:
            self._release(replica)

    def _add(self, name: str, group: HostingGroup) -> SimulatedReplica:
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
        """Drain a ready replica; one that never was ready has nothing to drain."""
        if replica.state == "starting":
            replica.state = "gone"
            self._forget(replica)
            return
        replica.close("draining")
        self._stages[replica.stage].look_around()
        if not replica.inflight:
            self.ended(replica)

    def _forget(self, replica: SimulatedReplica) -> None:
        self.settle()
        self.cores -= replica.group.cores
        self._members[replica.stage].remove(replica)
