"""What every family builds, and what it is built from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from trimtab_pipelines.operating_point import OperatingPoint


class Network(Protocol):
    """A model that computes one batch."""

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Compute one batch at an operating point: named tensors in, named tensors out, rows first.

        Called in inference mode, by one thread at a time. The operating point may differ from batch to batch; a
        family without modalities or tokens to choose has one point and need not look at it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """A network, where its weights came from, and what else its metadata should tell."""

    network: Network
    weights: Literal["stored", "random", "none"]
    facts: Mapping[str, bool | int | float | str] = field(default_factory=dict)
