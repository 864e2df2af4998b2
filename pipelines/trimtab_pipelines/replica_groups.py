"""Replica groups: variants of a stage that share replicas.

Variants that request the same resources on the same nodes are loaded together, so that a change of variant starts no
pod (docs/decisions/004). A variant with its own container, or of a stage with `variantPlacement: Dedicated`, is a group
of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_pipelines.rollout import Capacity
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

SERVER_MEMORY_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Variants of one stage that one replica hosts. A group of one variant has its name."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(variant.name for variant in self.variants)

    @property
    def cores(self) -> float:
        """Cores that one replica requests; the same for each of its variants."""
        return self.variants[0].resources.cpu

    @property
    def gpus(self) -> int:
        """Devices that one replica requests; the same for each of its variants."""
        return self.variants[0].resources.gpu

    @property
    def flavor(self) -> str | None:
        """Resource flavor that its variants name."""
        return self.variants[0].flavor

    @property
    def capacity(self) -> Capacity:
        """Resources that one replica requests."""
        return Capacity.in_flavor(self.cores, self.gpus, self.flavor)

    def cost_per_hour(self, spec: InferencePipelineSpec) -> float:
        """Cost of one replica; UserError if its flavor is unknown."""
        return spec.flavor(self.variants[0]).cost_per_hour(self.cores, memory_bytes(self.variants), self.gpus)


def memory_bytes(variants: Sequence[Variant]) -> int:
    """Memory of a replica: the model server's and each hosted variant's; a user-provided container has only its own."""
    own = 0 if variants[0].container is not None else SERVER_MEMORY_BYTES
    return own + sum(variant.resources.memory for variant in variants)


def replica_groups(stage: Stage) -> tuple[ReplicaGroup, ...]:
    """Replica groups of a stage, in the order of each group's first variant."""
    return tuple(ReplicaGroup(_name(variants), variants) for variants in stage.hosted.values())


def group_of(stage: Stage, variant: str) -> ReplicaGroup:
    """The replica group of a variant; KeyError lists the known variants."""
    stage.variant(variant)
    return next(group for group in replica_groups(stage) if variant in group.names)


def _name(variants: Sequence[Variant]) -> str:
    if len(variants) == 1:
        return variants[0].name
    joined = ",".join(variant.name for variant in variants)
    return f"shared-{hashlib.sha256(joined.encode()).hexdigest()[:4]}"
