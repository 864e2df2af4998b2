"""Tensor specifications, in the terms of the Open Inference Protocol V2."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from trimtab_pipelines.resource import Model

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]
_ITEM_BYTES = {"BOOL": 1, "8": 1, "16": 2, "32": 4, "64": 8}
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=128)]


class TensorSpec(Model):
    """A named tensor. The first dimension (rows) is implicit; `shape` is the shape of one row."""

    name: TensorName
    datatype: Datatype
    shape: tuple[Annotated[int, Field(ge=-1)], ...] = Field(default=(), max_length=16)
    """Shape of one row; -1 for a dimension of any size."""

    def fits(self, shape: Sequence[int]) -> bool:
        row = tuple(shape[1:])
        return (row == self.shape and len(shape) > 0) or (
            len(row) == len(self.shape)
            and len(shape) > 0
            and all(expected in {-1, size} for expected, size in zip(self.shape, row, strict=True))
        )

    def can_hold(self, padding: float) -> bool:
        """Whether a dimension has any size, so that rows are padded, and the number is one of the datatype."""
        if -1 not in self.shape or self.datatype in {"BYTES", "BOOL"}:
            return False
        if self.datatype.startswith("FP"):
            return math.isfinite(padding)
        bits = int(self.datatype.lstrip("UINT"))
        low, high = (0, 2**bits) if self.datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        return padding.is_integer() and low <= padding < high

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as binary data; 0 for strings and open shapes."""
        if self.datatype == "BYTES" or -1 in self.shape:
            return 0
        return math.prod(self.shape) * _ITEM_BYTES[self.datatype.lstrip("UINTFP")]


class RequestInput(TensorSpec):
    """An input tensor of a request."""

    optional: bool = False
    """Whether a request may omit the input; stages that require it are then skipped."""


class StageOutput(TensorSpec):
    """An output tensor of a stage."""

    counted_by: TensorName | None = None
    """Integer output with the number of this tensor's rows for each input row. Stages that read this tensor run once
    for each of its rows (fan-out).
    """
    expected_rows: float = Field(default=1.0, gt=0)
    """Expected rows per input row, used for planning until measured; with countedBy. For an encoder stage, the expected
    images per chat.
    """


def check_counts(stage: str, outputs: Sequence[StageOutput]) -> None:
    """Require that `countedBy` names an integer output of one number per row."""
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
    """Require that `confidence` names an output of one number per row."""
    if confidence is None:
        return
    by_name, where = {output.name: output for output in outputs}, f"stage {stage}: confidence {confidence!r}"
    output = by_name.get(confidence)
    if output is None:
        raise ValueError(f"{where} is not one of its outputs: {', '.join(by_name)}")
    if output.datatype not in {"FP32", "FP64"} or output.shape or output.counted_by:
        raise ValueError(f"{where} must be an FP32 or FP64 output with an empty shape and no countedBy")
