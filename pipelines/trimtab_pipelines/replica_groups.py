"""Replica groups: variants of a stage that share replicas.

Variants that request the same resources on the same nodes are loaded together, so that a change of variant starts no
pod (docs/decisions/004). A variant with its own container, or of a stage with `variantPlacement: Dedicated`, is a group
of its own.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant


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
        """GPUs that one replica requests; the same for each of its variants."""
        return self.variants[0].resources.gpu


def replica_groups(stage: Stage) -> tuple[ReplicaGroup, ...]:
    """Replica groups of a stage, in the order of each group's first variant."""
    groups: dict[Hashable, list[Variant]] = {}
    for variant in stage.variants:
        groups.setdefault(stage.hosting_key(variant), []).append(variant)
    return tuple(ReplicaGroup(_name(variants), tuple(variants)) for variants in groups.values())


def group_of(stage: Stage, variant: str) -> ReplicaGroup:
    """The replica group of a variant; KeyError lists the known variants."""
    stage.variant(variant)
    return next(group for group in replica_groups(stage) if variant in group.names)


def _name(variants: list[Variant]) -> str:
    if len(variants) == 1:
        return variants[0].name
    joined = ",".join(variant.name for variant in variants)
    return f"shared-{hashlib.sha256(joined.encode()).hexdigest()[:4]}"
