"""Splits the response to a batch into the rows of each member."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES, Tensor
from trimtab_protocol.tensors import Array

_HEADER_BYTES = 64 * 1024


def max_response_bytes(stage: Stage, rows: int, otherwise: int) -> int:
    """Maximum size of a valid response. `otherwise` if the stage leaves the size of its rows open."""
    total = _HEADER_BYTES
    for output in stage.outputs:
        size = DTYPES[output.datatype].itemsize
        if output.counted_by is not None or output.datatype == "BYTES" or any(dim < 0 for dim in output.shape):
            return otherwise
        total += rows * size * prod(output.shape)
    return total


class MalformedResponse(Exception):
    """A model server's response does not match the stage's outputs."""


def scatter(stage: Stage, outputs: Sequence[Tensor], members: Sequence[int]) -> list[dict[str, Array]]:
    """Split the outputs of a batch.

    Args:
        stage: stage of the batch.
        outputs: outputs of the whole batch.
        members: rows of each member, in batch order.

    Returns:
        For each member its rows of every output, as views. A counted output has as many rows as its counts add up to.

    Raises:
        MalformedResponse: an output is missing, has another datatype or shape, or a wrong number of rows.
    """
    tensors = {tensor.name: tensor for tensor in outputs}
    edges = np.concatenate(([0], np.cumsum(members)))
    split: list[dict[str, Array]] = [{} for _ in members]
    for output in stage.outputs:
        array = _checked_array(stage.name, output, tensors)
        ends = edges if output.counted_by is None else _counted_edges(stage.name, output.counted_by, tensors, edges)
        if len(array) != ends[-1]:
            raise MalformedResponse(
                f"stage {stage.name}: output {output.name!r} has {len(array)} rows; it must have {ends[-1]}"
            )
        for member, rows in enumerate(split):
            rows[output.name] = array[ends[member] : ends[member + 1]]
    return split


def _checked_array(stage: str, output: StageOutput, tensors: Mapping[str, Tensor]) -> Array:
    tensor = tensors.get(output.name)
    if tensor is None:
        raise MalformedResponse(
            f"stage {stage}: the response has no output {output.name!r}; it has: {', '.join(tensors)}"
        )
    if tensor.datatype != output.datatype:
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} is {tensor.datatype}; it must be {output.datatype}"
        )
    if not output.fits(tensor.shape):
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} has shape {list(tensor.shape)}; "
            f"its rows must have shape {list(output.shape)}"
        )
    return tensor.array


def _counted_edges(stage: str, count: str, tensors: Mapping[str, Tensor], edges: Array) -> Array:
    """Row boundaries of each member in a counted output."""
    tensor = tensors.get(count)
    if tensor is None or tensor.array.shape != (edges[-1],) or (tensor.array < 0).any():
        raise MalformedResponse(
            f"stage {stage}: output {count!r} must hold one non-negative count for each of {edges[-1]} rows"
        )
    totals = np.concatenate(([0], np.cumsum(tensor.array, dtype=np.int64)))
    return np.asarray(totals[edges])
