"""`BatchRequest`: a batch as binary tensors or, for servers that do not read these, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_protocol import Buffer, Parameters, Tensor, rest


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch for one replica."""

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


def encode_binary(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    """Body in parts, and headers."""
    body, header_length = rest.encode_batch(batch.inputs, batch.parameters, batch.id)
    headers = {
        "Content-Type": rest.BINARY_CONTENT_TYPE,
        rest.HEADER_LENGTH: str(header_length),
        **batch.headers,
    }
    return body, headers


def encode_json(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    """Body and headers for a server that does not read binary tensors."""
    inputs = [_concatenate(tensors) for tensors in batch.inputs]
    body = rest.encode_json(inputs, batch.parameters, batch.id)
    return [body], {"Content-Type": rest.JSON_CONTENT_TYPE, **batch.headers}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return Tensor(first.name, first.datatype, np.concatenate([tensor.array for tensor in tensors]))
