"""CPU usage on the machine that a pipeline shares with other processes."""

from pydantic import Field

from trimtab_pipelines.resource import Model


class Machine(Model):
    """Cores of the machine, and cores used by other processes than replicas: router, proxy, clients."""

    cores: float = Field(gt=0)
    other_cores: float = Field(ge=0)

    @property
    def available_cores(self) -> float:
        """Cores that replicas can use; at least one."""
        return max(self.cores - self.other_cores, 1.0)
