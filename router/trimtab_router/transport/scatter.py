"""Gives each member of a batch its own rows of the answer, and only those. Pure."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES, Tensor
from trimtab_protocol.tensors import Array

_HEADER_BYTES = 64 * 1024


def most_answer_bytes(stage: Stage, rows: int, otherwise: int) -> int:
    """The most bytes an honest answer to so many rows has; `otherwise` where the stage leaves the size of rows open."""
    total = _HEADER_BYTES
    for output in stage.outputs:
        size = DTYPES[output.datatype].itemsize
        if output.counted_by is not None or output.datatype == "BYTES" or any(dim < 0 for dim in output.shape):
            return otherwise
        total += rows * size * prod(output.shape)
    return total


class MalformedResponse(Exception):
    """A model server's answer is not what the stage promises."""


def scatter(stage: Stage, answer: Sequence[Tensor], members: Sequence[int]) -> list[dict[str, Array]]:
    """Split the outputs of a batch.

    Args:
        stage: whose outputs they are.
        answer: the outputs of the whole batch.
        members: rows of each member, in the order in which they went into the batch.

    Returns:
        For each member its rows of every output, as views. A counted output has as many as its counts add up to.

    Raises:
        BrokenAnswer: an output is missing, has another datatype or shape, or not one entry for each row.
    """
    found = {tensor.name: tensor for tensor in answer}
    edges = np.concatenate(([0], np.cumsum(members)))
    split: list[dict[str, Array]] = [{} for _ in members]
    for output in stage.outputs:
        array = _checked(stage.name, output, found)
        ends = edges if output.counted_by is None else _counted_edges(stage.name, output.counted_by, found, edges)
        if len(array) != ends[-1]:
            raise MalformedResponse(
                f"stage {stage.name}: output {output.name!r} has {len(array)} rows; it must have {ends[-1]}"
            )
        for member, rows in enumerate(split):
            rows[output.name] = array[ends[member] : ends[member + 1]]
    return split


def _checked(stage: str, output: StageOutput, found: Mapping[str, Tensor]) -> Array:
    tensor = found.get(output.name)
    if tensor is None:
        raise MalformedResponse(f"stage {stage}: the answer lacks output {output.name!r}; it has: {', '.join(found)}")
    if tensor.datatype != output.datatype:
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} is {tensor.datatype}; it must be {output.datatype}"
        )
    if not output.fits(tensor.shape):
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} has shape {list(tensor.shape)}; "
            f"rows of {list(output.shape)} were promised"
        )
    return tensor.array


def _counted_edges(stage: str, count: str, found: Mapping[str, Tensor], edges: Array) -> Array:
    """Where each member's counted rows begin and end."""
    tensor = found.get(count)
    if tensor is None or tensor.array.shape != (edges[-1],) or (tensor.array < 0).any():
        raise MalformedResponse(
            f"stage {stage}: output {count!r} must hold one non-negative count for each of {edges[-1]} rows"
        )
    totals = np.concatenate(([0], np.cumsum(tensor.array, dtype=np.int64)))
    return np.asarray(totals[edges])
