"""The one machine that a pipeline runs on, and what is left of it for replicas."""

from pydantic import Field

from trimtab_pipelines.resource import Model


class Machine(Model):
    """Its processor cores, and how many of them others than the replicas keep busy: router, door, callers."""

    cores: float = Field(gt=0)
    other_cores: float = Field(ge=0)

    @property
    def available_cores(self) -> float:
        """Cores that replicas can compute on all the time; one at the least, which they then share."""
        return max(self.cores - self.other_cores, 1.0)
