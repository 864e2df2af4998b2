"""`ResourceFlavor`: a kind of hardware that replicas run on, with its nodes, its devices and its prices.

Without flavors there is one kind of hardware, on which a core costs 1 an hour.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from pydantic import Field, model_validator

from trimtab_pipelines.errors import UserError
from trimtab_pipelines.quantity import Amount, Bytes, Seconds
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.variants import Toleration, Variant

DEFAULT_NAME = "default"
"""Flavor of variants that name none."""
DEVICE_CORES = 20.0
"""Price of a device in cores, unless set. Clouds rent a small GPU, such as an L4, for the price of 15 to 25 cores."""


class Prices(Model):
    """Prices an hour, in any currency that all flavors share."""

    core: Amount = 1.0
    gib: Amount = 0.0
    """Of a GiB of memory."""
    device: Amount = DEVICE_CORES


class ResourceFlavor(Model):
    """A kind of hardware. A variant names the one that its replicas run on."""

    name: Name
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=16, exclude_if=is_empty)
    """Labels of its nodes, in addition to those that a variant selects."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16, exclude_if=is_empty)
    """Taints of its nodes."""
    device: str = Field(default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)
    """Extended resource that a replica requests for each `resources.gpu`: a GPU, or a part of one such as
    nvidia.com/mig-1g.10gb.
    """
    prices: Prices = Prices()
    limit: Amount | None = Field(default=None, exclude_if=lambda limit: limit is None)
    """Most devices that the replicas of a pipeline may request together; cores, for replicas without devices."""
    memory: Bytes | None = Field(default=None, gt=0, exclude_if=lambda memory: memory is None)
    """Memory that pods can request on one of its nodes. Replicas that need more are not planned."""
    node_startup_seconds: Seconds = Field(default=0.0, alias="nodeStartup", exclude_if=is_empty)
    """Usual time until an autoscaler has added a node. A replica may wait twice as long for one."""
    spot: bool = Field(default=False, exclude_if=is_empty)
    """Whether its nodes may be reclaimed at short notice. `trimtab explain` shows their savings and their risk."""

    @model_validator(mode="after")
    def _require_named_limit(self) -> Self:
        if self.name == DEFAULT_NAME and self.limit is not None:
            raise ValueError("flavors: default has a limit; set budget.cores and budget.gpus instead")
        return self

    def cost_per_hour(self, cores: float, memory_bytes: float, devices: int) -> float:
        return self.prices.core * cores + self.prices.gib * memory_bytes / 2**30 + self.prices.device * devices


class ResourceFlavors(Model):
    """The flavors of a cluster."""

    flavors: tuple[ResourceFlavor, ...] = Field(max_length=64)


DEFAULT_FLAVOR = ResourceFlavor(name=DEFAULT_NAME)


def flavor_of(flavors: Sequence[ResourceFlavor], variant: Variant) -> ResourceFlavor:
    """The flavor of a variant's replicas; UserError lists the known flavors."""
    named = {flavor.name: flavor for flavor in flavors}
    if variant.flavor is None:
        return named.get(DEFAULT_NAME, DEFAULT_FLAVOR)
    if variant.flavor not in named:
        declared = ", ".join(named) or "none"
        raise UserError(f"variant {variant.name}: there is no resource flavor {variant.flavor!r}; declared: {declared}")
    return named[variant.flavor]


def merge_flavors(own: Sequence[ResourceFlavor], shared: Iterable[ResourceFlavor]) -> tuple[ResourceFlavor, ...]:
    """A pipeline's own flavors and the others of the cluster."""
    names = {flavor.name for flavor in own}
    return (*own, *(flavor for flavor in shared if flavor.name not in names))
