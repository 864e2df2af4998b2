"""What a tensor must look like, as Open Inference Protocol V2 names it."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from trimtab_pipelines.resource import Model

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
]
_ITEM_BYTES = {"BOOL": 1, "8": 1, "16": 2, "32": 4, "64": 8}
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=128)]


class TensorSpec(Model):
    """One named tensor. The first dimension, the rows, is implicit: `shape` is the shape of one row."""

    name: TensorName
    datatype: Datatype
    shape: tuple[Annotated[int, Field(ge=-1)], ...] = Field(
        default=(), max_length=16, description="Shape of one row; -1 where any size is accepted"
    )

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape, its rows first, holds such rows."""
        return len(shape) == len(self.shape) + 1 and all(
            size in {-1, given} for size, given in zip(self.shape, shape[1:], strict=True)
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as binary data, as far as they are known: of texts and of open shapes nothing is."""
        if self.datatype == "BYTES" or -1 in self.shape:
            return 0
        return math.prod(self.shape) * _ITEM_BYTES[self.datatype.lstrip("UINTFP")]


class RequestInput(TensorSpec):
    """A tensor the client sends."""

    optional: bool = Field(default=False, description="Stages that need it are skipped where a request leaves it out")


class StageOutput(TensorSpec):
    """A tensor a stage produces."""

    counted_by: TensorName | None = Field(
        default=None,
        description="Name of the integer output that tells how many rows of this tensor belong to each input row; "
        "stages reading this tensor run once for each of its rows (fan-out)",
    )
    expected_rows: float = Field(
        default=1.0,
        gt=0,
        description="Rows per input row to plan with until measured; used with countedBy, and of a stage that encodes: "
        "images a chat",
    )


def check_counts(stage: str, outputs: Sequence[StageOutput]) -> None:
    """Check that each counted output names an integer output of one number per row."""
    by_name = {output.name: output for output in outputs}
    for output in outputs:
        if output.counted_by is None:
            continue
        count = by_name.get(output.counted_by)
        where = f"stage {stage}: outputs.{output.name}.countedBy {output.counted_by!r}"
        if count is None:
            raise ValueError(f"{where} is not one of its outputs: {', '.join(by_name)}")
        if count.datatype not in {"INT32", "INT64", "UINT32", "UINT64"} or count.shape or count.counted_by:
            raise ValueError(f"{where} must be an INT32 or INT64 output with an empty shape and no countedBy")


def check_confidence_output(stage: str, confidence: str | None, outputs: Sequence[StageOutput]) -> None:
    """Check that it names an output of one number per row, in a stage whose rows stay apart from each other."""
    if confidence is None:
        return
    by_name, where = {output.name: output for output in outputs}, f"stage {stage}: confidence {confidence!r}"
    output = by_name.get(confidence)
    if output is None:
        raise ValueError(f"{where} is not one of its outputs: {', '.join(by_name)}")
    if output.datatype not in {"FP32", "FP64"} or output.shape:
        raise ValueError(f"{where} must be an FP32 or FP64 output with an empty shape")
    counted = next((other.name for other in outputs if other.counted_by is not None), None)
    if counted is not None:
        raise ValueError(f"{where} needs outputs of one entry per row, but {counted!r} is counted")
