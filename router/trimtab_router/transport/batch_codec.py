"""Requests and responses of batches: tensors as binary or JSON, and outputs split by row slice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol import DTYPES, Buffer, Parameters, Tensor, rest
from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.tensors import Array

_HEADER_BYTES = 64 * 1024


@dataclass(slots=True)  # frozen would double the cost of construction
class BatchRequest:
    """A batch for one replica. Treat it as immutable."""

    id: str
    """Must be repeated in the response."""
    variant: str
    inputs: Sequence[Sequence[Tensor]]
    """For each input its tensors, one per row slice."""
    parameters: Parameters
    headers: Mapping[str, str]
    timeout_seconds: float
    max_response_bytes: int
    """Bound on the size of a valid response."""
    forwarded: ForwardedRequest | None = None
    """Set if `messages` is the body of a request to a third-party engine."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of a third-party engine's image processor."""
    adapter: str = ""
    """Name of the adapter, in a third-party engine, that serves the batch; empty for none."""


def encode_binary(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    body, header_length = rest.encode_batch(batch.inputs, batch.parameters, batch.id)
    headers = {"Content-Type": rest.BINARY_CONTENT_TYPE, rest.HEADER_LENGTH: str(header_length), **batch.headers}
    return body, headers


def encode_json(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    inputs = [_concatenate(tensors) for tensors in batch.inputs]
    body = rest.encode_json(inputs, batch.parameters, batch.id)
    return [body], {"Content-Type": rest.JSON_CONTENT_TYPE, **batch.headers}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return Tensor(first.name, first.datatype, np.concatenate([tensor.array for tensor in tensors]))


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
    """Split a batch's outputs into views of each member's rows, given the numbers of rows. Raises MalformedResponse."""
    edges = [0, *accumulate(members)]
    split = [dict[str, Array]() for _ in members]
    for output in stage.outputs:
        array = _checked_array(stage.name, output, outputs)
        ends = edges if output.counted_by is None else _counted_edges(stage.name, output.counted_by, outputs, edges)
        if len(array) != ends[-1]:
            raise MalformedResponse(
                f"stage {stage.name}: output {output.name!r} has {len(array)} rows; it must have {ends[-1]}"
            )
        for member, rows in enumerate(split):
            rows[output.name] = array[ends[member] : ends[member + 1]]
    return split


def _checked_array(stage: str, output: StageOutput, tensors: Sequence[Tensor]) -> Array:
    for tensor in tensors:
        if tensor.name == output.name:
            break
    else:
        names = ", ".join([tensor.name for tensor in tensors])
        raise MalformedResponse(f"stage {stage}: the response has no output {output.name!r}; it has: {names}")
    if tensor.datatype != output.datatype:
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} is {tensor.datatype}; it must be {output.datatype}"
        )
    if not output.fits(tensor.array.shape):
        raise MalformedResponse(
            f"stage {stage}: output {output.name!r} has shape {list(tensor.shape)}; "
            f"its rows must have shape {list(output.shape)}"
        )
    return tensor.array


def _counted_edges(stage: str, count: str, tensors: Sequence[Tensor], edges: list[int]) -> list[int]:
    tensor = next((tensor for tensor in tensors if tensor.name == count), None)
    if tensor is None or tensor.array.shape != (edges[-1],) or (tensor.array < 0).any():
        raise MalformedResponse(
            f"stage {stage}: output {count!r} must hold one non-negative count for each of {edges[-1]} rows"
        )
    totals = np.concatenate(([0], np.cumsum(tensor.array, dtype=np.int64)))
    return [int(total) for total in totals[edges]]
