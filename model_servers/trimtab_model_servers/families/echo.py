"""y = x + increment, after a delay that is the same whatever the batch: for measuring everything around a model."""

import time
from dataclasses import dataclass

import torch
from pydantic import Field

from trimtab_model_servers.families.network import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.spec import OperatingPoint


class EchoParameters(Parameters):
    """Settings of the family."""

    increment: float = Field(default=1.0, description="Added to every number")
    delay_seconds: float = Field(default=0.0, ge=0, le=60, description="Seconds a batch takes, whatever its rows")


@dataclass(frozen=True, slots=True)
class Echo:
    """The first input's numbers plus the increment, as the first output, in the input's own datatype."""

    parameters: EchoParameters
    source: str
    target: str

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Add and wait."""
        del point  # there is one way to echo
        x = inputs[self.source]
        y = (x + self.parameters.increment).to(x.dtype)
        if self.parameters.delay_seconds:
            time.sleep(self.parameters.delay_seconds)
        return {self.target: y}


def build(spec: ModelSpec) -> Built:
    """Build an echo between the stage's first input and first output; it has no weights."""
    return Built(Echo(read_parameters(EchoParameters, spec), spec.inputs[0].name, spec.outputs[0].name), "none")
