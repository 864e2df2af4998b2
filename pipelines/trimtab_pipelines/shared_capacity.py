"""Capacity that pipelines of a cluster share: pools."""

from pydantic import Field

from trimtab_pipelines.quantity import Cores
from trimtab_pipelines.resource import Model, Name


class Pool(Model):
    """Limits on what the pipelines whose `spec.budget.pool` names the pool may request together."""

    cores: Cores = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    namespaces: tuple[Name, ...] = ()
    """Namespaces whose pipelines may use the pool; all if empty."""
    max_gain: float = Field(default=20.0, gt=0)
    """Largest gain of its objective that one pipeline may claim from the pool. Larger claims, from its weights or its
    switching cost, are scaled down to this.
    """


class Pools(Model):
    """The pools of a cluster by name, as in the file given with `--pools`."""

    pools: dict[Name, Pool]
