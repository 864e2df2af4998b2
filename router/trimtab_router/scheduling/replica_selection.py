"""`ReplicaSelection`: the variant and the replica of each batch, chosen at dispatch (late binding).

If the plan chooses the encoder placement, some variants encode images themselves and others pull embeddings from an
encoder stage. Make before break: a disaggregated variant takes over once encoders are ready; until then the colocated
one goes on.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_router.scheduling.replica_slots import ReplicaSlots

_FREE = attrgetter("free")


class EncoderStage(Protocol):
    """An encoder stage."""

    @property
    def ready_replicas(self) -> int: ...


class ReplicaSelection:
    """Variants and replicas of one stage. Without colocated variants it runs the planned variant."""

    def __init__(self, stage: Stage, planned: str) -> None:
        self.encoders: list[EncoderStage] = []
        self.on_placement_change: Callable[[], None] = lambda: None  # between colocated and disaggregated
        self.readiness_listeners: list[Callable[[], None]] = []  # called at the first one and without any
        self._chooses = stage.chooses_encoder_placement
        self._colocated = {
            variant.name: stage.excluded_input(variant.name) == EMBEDDINGS_INPUT for variant in stage.variants
        }
        self._target = planned  # the variant that batches run as soon as a replica offers it
        self._had_replicas = False

    def effective_variant(self, replicas: Iterable[ReplicaSlots], planned: str, current: str) -> str:
        """Return the variant of the whole stage: the planned one, once replicas offer it and its encoders are ready."""
        starts_to_pull = self._colocated[current] and not self._colocated[planned]
        encoders_ready = all(encoder.ready_replicas for encoder in self.encoders)
        self._target = current if starts_to_pull and not encoders_ready else planned
        ready: frozenset[str] = frozenset().union(*(replica.ready_variants for replica in replicas))
        return _ready_variant(ready, self._target, current) or current

    def variant_for(self, replica: ReplicaSlots, current: str) -> str | None:
        """Return a replica's variant; None if it may not serve. Of a colocated stage, only colocated ones may."""
        ready = replica.ready_variants
        if self._target in ready and not self._chooses:  # the common case
            return self._target
        if self._chooses and self._colocated[current]:
            ready = frozenset(variant for variant in ready if self._colocated[variant])
        return _ready_variant(ready, self._target, current)

    def free_replica(self, replicas: Iterable[ReplicaSlots], current: str) -> ReplicaSlots | None:
        if self._chooses:
            replicas = [replica for replica in replicas if self.variant_for(replica, current)]
        free = list(filter(_FREE, replicas))
        if len(free) < 2:  # the common case, for every batch
            return free[0] if free else None
        return _least_loaded(free, self._target)

    def early_prefill_replica(self, replicas: Iterable[ReplicaSlots], current: str) -> tuple[ReplicaSlots, str] | None:
        variants = {replica: self.variant_for(replica, current) for replica in replicas if replica.has_spare_capacity}
        fitting = {
            replica: variant
            for replica, variant in variants.items()
            if variant is not None and variant in replica.partial_prefill and not self._colocated[variant]
        }
        replica = _least_loaded(list(fitting), self._target)
        return None if replica is None else (replica, fitting[replica])

    def notify(self, before: str, now: str, replicas: int) -> None:
        readiness_changed, self._had_replicas = bool(replicas) != self._had_replicas, bool(replicas)
        if self._colocated[before] != self._colocated[now]:
            self.on_placement_change()
        if readiness_changed:
            for listener in self.readiness_listeners:
                listener()


def _ready_variant(ready: frozenset[str], planned: str, current: str) -> str | None:
    """Return the planned variant if it is ready, else the current one, else any; None if none is ready."""
    if planned in ready:
        return planned
    if current in ready:
        return current
    return min(ready, default=None)


def _least_loaded(replicas: Sequence[ReplicaSlots], planned: str) -> ReplicaSlots | None:
    """Return a replica of the planned variant if possible, then the least loaded and least recently used.

    An engine in which requests wait comes last, and requests of others at an engine count as its load.
    """

    def load(replica: ReplicaSlots) -> tuple[bool, bool, float, int]:
        pending = replica.pending_tokens if replica.prefilling else replica.inflight
        if replica.engine_load is None:
            return planned not in replica.ready_variants, False, pending, replica.last_used
        pending += replica.foreign_requests
        return planned not in replica.ready_variants, replica.has_engine_queue, pending, replica.last_used

    return min(replicas, key=load, default=None)
