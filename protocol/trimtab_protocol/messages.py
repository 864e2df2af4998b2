"""Inference requests and responses, independent of REST and gRPC."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from trimtab_protocol.tensors import Tensor

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]
MAX_SHARED_HEADERS = 256
MAX_SHARED_BYTES = 1024
"""Largest header of requests that is read once for all that have it."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output; `parameters` as sent (`binary_data` over REST)."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)  # frozen would double the cost of construction
class InferRequest:
    """A ModelInfer request. Without requested outputs, all are returned. Treat it as immutable."""

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    requested_outputs: tuple[RequestedOutput, ...] = ()


class TensorHeader(NamedTuple):
    """Name, datatype and shape of a tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(slots=True)  # frozen would double the cost of construction
class PendingRequest:
    """A request whose tensors are not decoded yet, so that a refused request costs little. Treat it as immutable.

    `request` has no tensors, `inputs` has their headers, `decoders` one decoder for each. `slow` is whether decoding
    may block the event loop noticeably; `written_bytes` counts JSON or typed contents, which need many times their size
    in memory. If it is `shared`, other requests have the very same `request` and `inputs`.
    """

    request: InferRequest
    inputs: tuple[TensorHeader, ...]
    slow: bool
    written_bytes: int
    decoders: tuple[Callable[[], Tensor], ...]
    shared: bool = False

    @classmethod
    def of(cls, request: InferRequest) -> "PendingRequest":
        inputs = tuple(TensorHeader(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs)
        return cls(request, inputs, False, 0, tuple(partial(_same, tensor) for tensor in request.inputs))

    def decode(self) -> InferRequest:
        """Decode the tensors; ProtocolError if values do not fit their header."""
        return replace(self.request, inputs=tuple(decoder() for decoder in self.decoders))


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)  # frozen would double the cost of construction
class InferResponse:
    """A ModelInfer response. Treat it as immutable."""

    model_name: str
    outputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
