"""Which variant each batch of a stage runs and which replica gets it, also where images may be encoded apart. Pure.

Of a stage whose plan chooses, some variants read images themselves and others pull what a stage that encodes made of
them. Make before break: the second kind runs once there is who encodes; until then the first goes on.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_router.scheduling import replica_selection
from trimtab_router.scheduling.replica_slots import ReplicaSlots


class EncoderStage(Protocol):
    """A stage that encodes."""

    @property
    def ready_replicas(self) -> int:
        """How many could serve."""


class VariantSelection:
    """What a stage may run; one without variants that are whole runs whatever is planned.

    Args:
        stage: the stage.
        planned: the variant it should run at first.
    """

    def __init__(self, stage: Stage, planned: str) -> None:
        self.encoders: list[EncoderStage] = []
        """Who encodes for it."""
        self.on_placement_change: Callable[[], None] = lambda: None
        """Called when it goes over to variants that read images themselves, or to those that do not."""
        self.readiness_listeners: list[Callable[[], None]] = []
        """Called when its first replica is there, or its last one is gone."""
        self._chooses = stage.chooses_encoder_placement
        self._whole = {
            variant.name: stage.excluded_input(variant.name) == EMBEDDINGS_INPUT for variant in stage.variants
        }
        self._aim = planned
        self._had_replicas = False

    def is_colocated(self, variant: str) -> bool:
        """Whether a variant reads images itself."""
        return self._whole[variant]

    def effective(self, replicas: Sequence[ReplicaSlots], planned: str, current: str) -> str:
        """The variant a stage as a whole runs: the planned one, once replicas offer it and who it needs is there."""
        begins_to_pull = self._whole[current] and not self._whole[planned]
        fed = all(feeder.ready_replicas for feeder in self.encoders)
        self._aim = current if begins_to_pull and not fed else planned
        return replica_selection.effective_variant(replicas, self._aim, current)

    def variant_for(self, replica: ReplicaSlots, current: str) -> str | None:
        """What a replica would run; None where it may not answer those who wait.

        Before images are encoded apart, only who reads them itself may. Afterwards all may: also for those whom an
        encoder has served.
        """
        ready = replica.ready_variants
        if self._chooses and self._whole[current]:
            ready = frozenset(variant for variant in ready if self._whole[variant])
        return replica_selection.variant_for(ready, self._aim, current)

    def least_loaded(self, replicas: Sequence[ReplicaSlots], current: str) -> ReplicaSlots | None:
        """The free replica for the next batch; None where none is free."""
        usable = [replica for replica in replicas if self.variant_for(replica, current)] if self._chooses else replicas
        return replica_selection.least_loaded(usable, self._aim)

    def notify(self, before: str, now: str, replicas: int) -> None:
        """Call those whom a change concerns, from one variant to another with so many replicas ready."""
        came_or_went, self._had_replicas = bool(replicas) != self._had_replicas, bool(replicas)
        if self._whole[before] != self._whole[now]:
            self.on_placement_change()
        if came_or_went:
            for listener in self.readiness_listeners:
                listener()
