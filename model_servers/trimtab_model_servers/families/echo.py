"""Echo model on NumPy arrays, y = x + increment after a fixed delay: for measurements without a real model."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})


class EchoParameters(Parameters):
    """Settings of the family."""

    increment: float = Field(default=1.0, description="Added to every number")
    delay_seconds: float = Field(default=0.0, ge=0, le=60, description="Seconds of a batch of any size")


@dataclass(frozen=True, slots=True)
class Echo:
    """Returns the first input plus the increment as the first output, in the input's datatype."""

    parameters: EchoParameters
    source: str
    target: str

    def infer(self, inputs: dict[str, NDArray[Any]], point: OperatingPoint) -> dict[str, NDArray[Any]]:
        del point  # only the first input is used
        x = inputs[self.source]
        y = np.add(x, self.parameters.increment).astype(x.dtype, copy=False)
        if self.parameters.delay_seconds:
            time.sleep(self.parameters.delay_seconds)
        return {self.target: y}


def build(spec: ModelSpec) -> Built:
    """Build an echo of the stage's first input to its first output, without weights."""
    source = spec.inputs[0].name
    for point in spec.operating_points:
        if point.modalities and source not in point.modalities:
            raise ModelError(f"operating point {point.name!r} leaves out {source!r}, the input of the echo")
    return Built(Echo(read_parameters(EchoParameters, spec), source, spec.outputs[0].name), "none")
