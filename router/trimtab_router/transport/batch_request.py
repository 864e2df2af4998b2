"""A batch as a replica is sent it, in binary tensors or, to servers that do not read these, as JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_protocol import Buffer, Parameters, Tensor, rest


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch for a replica: for each input its pieces, one after the other.

    `id` is what its answer must bear; `most_answer_bytes` is all that can honestly be answered to it.
    """

    id: str
    variant: str
    inputs: Sequence[Sequence[Tensor]]
    parameters: Parameters
    headers: Mapping[str, str]
    timeout_seconds: float
    most_answer_bytes: int


def encoded(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    """The body, in pieces, and the headers that tell of it and of the batch."""
    body, header_length = rest.encode_batch(batch.inputs, batch.parameters, batch.id)
    headers = {
        "Content-Type": rest.BINARY_CONTENT_TYPE,
        rest.HEADER_LENGTH: str(header_length),
        **batch.headers,
    }
    return body, headers


def as_json(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    """The same for a server that reads no binary tensors."""
    inputs = [_joined(pieces) for pieces in batch.inputs]
    body = rest.encode_json(inputs, batch.parameters, batch.id)
    return [body], {"Content-Type": rest.JSON_CONTENT_TYPE, **batch.headers}


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    first = pieces[0]
    return Tensor(first.name, first.datatype, np.concatenate([piece.array for piece in pieces]))
