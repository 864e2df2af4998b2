"""Labels: partial choices, one option for each stage so far, as arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import Floats


@dataclass(frozen=True, slots=True)
class Labels:
    """Partial choices; arrays of shape [labels], `finish` of shape [live groups of stages, labels]."""

    value: Floats
    cost: Floats
    cores: Floats
    gpus: Floats
    flow_seconds: Floats
    same: NDArray[np.bool_]
    disaggregated: NDArray[np.int8]
    finish: Floats
    parent: NDArray[np.intp]
    option: NDArray[np.intp]

    def take(self, which: NDArray[np.intp]) -> "Labels":
        """Select labels by index."""
        return Labels(
            value=self.value[which],
            cost=self.cost[which],
            cores=self.cores[which],
            gpus=self.gpus[which],
            flow_seconds=self.flow_seconds[which],
            same=self.same[which],
            disaggregated=self.disaggregated[which],
            finish=self.finish[:, which],
            parent=self.parent[which],
            option=self.option[which],
        )


def root(program: Program) -> Labels:
    """The label without any chosen option."""
    zero, nothing = np.zeros(1), np.zeros(1, dtype=np.intp)
    start = np.full(1, 1.0 if program.metric == "Product" else 0.0)
    same, disaggregated = np.array([program.other_than is not None]), np.full(1, -1, dtype=np.int8)
    return Labels(start, zero, zero, zero, zero, same, disaggregated, np.zeros((0, 1)), nothing, nothing)
