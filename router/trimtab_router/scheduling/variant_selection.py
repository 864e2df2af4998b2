"""`VariantSelection`: the variant that each batch of a stage runs, with colocated or disaggregated image encoding.

If the plan chooses the encoder placement, some variants encode images themselves and others pull embeddings from an
encoder stage. Make before break: a disaggregated variant takes over once encoders are ready; until then the colocated
one goes on.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_router.scheduling import replica_selection
from trimtab_router.scheduling.replica_slots import ReplicaSlots


class EncoderStage(Protocol):
    """An encoder stage."""

    @property
    def ready_replicas(self) -> int: ...


class VariantSelection:
    """Variants of one stage. Without colocated variants it runs the planned one.

    Args:
        stage: the stage.
        planned: the first planned variant.
    """

    def __init__(self, stage: Stage, planned: str) -> None:
        self.encoders: list[EncoderStage] = []
        self.on_placement_change: Callable[[], None] = lambda: None
        """Called when the stage changes between colocated and disaggregated variants."""
        self.readiness_listeners: list[Callable[[], None]] = []
        """Called when its first replica becomes ready, and when its last one is gone."""
        self._chooses = stage.chooses_encoder_placement
        self._whole = {
            variant.name: stage.excluded_input(variant.name) == EMBEDDINGS_INPUT for variant in stage.variants
        }
        self._aim = planned
        self._had_replicas = False

    def is_colocated(self, variant: str) -> bool:
        """Return whether a variant encodes images itself."""
        return self._whole[variant]

    def effective(self, replicas: Sequence[ReplicaSlots], planned: str, current: str) -> str:
        """Return the variant of the whole stage: the planned one, once replicas offer it and its encoders are ready."""
        begins_to_pull = self._whole[current] and not self._whole[planned]
        fed = all(feeder.ready_replicas for feeder in self.encoders)
        self._aim = current if begins_to_pull and not fed else planned
        return replica_selection.effective_variant(replicas, self._aim, current)

    def variant_for(self, replica: ReplicaSlots, current: str) -> str | None:
        """Return the variant that a replica would run; None if it may not serve the queued rows.

        While the stage is colocated, only colocated variants may. Afterwards all may, also for rows with embeddings.
        """
        ready = replica.ready_variants
        if self._chooses and self._whole[current]:
            ready = frozenset(variant for variant in ready if self._whole[variant])
        return replica_selection.variant_for(ready, self._aim, current)

    def least_loaded(self, replicas: Sequence[ReplicaSlots], current: str) -> ReplicaSlots | None:
        """Return the free replica for the next batch; None if none is free."""
        usable = [replica for replica in replicas if self.variant_for(replica, current)] if self._chooses else replicas
        return replica_selection.least_loaded(usable, self._aim)

    def notify(self, before: str, now: str, replicas: int) -> None:
        """Call the listeners of a change of variant or readiness."""
        came_or_went, self._had_replicas = bool(replicas) != self._had_replicas, bool(replicas)
        if self._whole[before] != self._whole[now]:
            self.on_placement_change()
        if came_or_went:
            for listener in self.readiness_listeners:
                listener()
