"""What every family builds, and what it is built from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from trimtab_model_servers.model_metadata import Fact
from trimtab_pipelines.operating_point import OperatingPoint

CPU = torch.device("cpu")


class Network(Protocol):
    """A model that computes one batch."""

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Compute one batch at an operating point: named tensors in, named tensors out, rows first.

        Called in inference mode, by one thread at a time. The operating point may differ from batch to batch; a
        family without modalities or tokens to choose has one point and need not look at it.
        """
        ...


@runtime_checkable
class RegistersTasks(Protocol):
    """A network whose tasks come and go while it serves."""

    def reread(self) -> None:
        """Put in force the tasks that its folder holds now."""
        ...

    def facts(self) -> dict[str, Fact]:
        """What its metadata tell of them."""
        ...


@runtime_checkable
class MovesToDevice(Protocol):
    """A network that computes wherever it is brought, on inputs that are there."""

    def place(self, device: torch.device) -> None:
        """Bring all that it holds to a device."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """A network, where its weights came from, and what else its metadata should tell."""

    network: Network
    weights: Literal["stored", "random", "none"]
    facts: Mapping[str, Fact] = field(default_factory=dict)
