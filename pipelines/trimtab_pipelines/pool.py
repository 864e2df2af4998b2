"""Cores and GPUs that several pipelines share: those whose `spec.budget.pool` names the same pool."""

from pydantic import Field

from trimtab_pipelines.quantity import Cores
from trimtab_pipelines.resource import Model, Name


class Pool(Model):
    """What all pipelines of one pool together may ask for."""

    cores: Cores = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    namespaces: tuple[Name, ...] = Field(default=(), description="Whose pipelines may name it; none listed means all")
    max_gain: float = Field(
        default=20.0,
        gt=0,
        description="The most that all of the pool may be worth to one pipeline, as its objective counts: one that "
        "would gain more, by its weights or its price of a change, is scaled down to this",
    )


class Pools(Model):
    """The pools of a cluster by name, as the file given with `--pools` lists them."""

    pools: dict[Name, Pool]
