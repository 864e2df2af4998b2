"""Inference requests and responses, independent of REST and gRPC."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from trimtab_protocol.tensors import Tensor

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output; `parameters` as sent (`binary_data` over REST)."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A ModelInfer request. Without requested outputs, all are returned."""

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    requested_outputs: tuple[RequestedOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, datatype and shape of a tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request whose tensors are not decoded yet, so that a refused request costs little.

    `request` has no tensors, `inputs` has their headers, `decoders` one decoder for each. `slow` is whether decoding
    may block the event loop noticeably; `written_bytes` counts JSON or typed contents, which need many times their size
    in memory.
    """

    request: InferRequest
    inputs: tuple[TensorHeader, ...]
    slow: bool
    written_bytes: int
    decoders: tuple[Callable[[], Tensor], ...]

    @classmethod
    def of(cls, request: InferRequest) -> "PendingRequest":
        inputs = tuple(TensorHeader(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs)
        return cls(request, inputs, False, 0, tuple(partial(_same, tensor) for tensor in request.inputs))

    def decode(self) -> InferRequest:
        """Decode the tensors; ProtocolError if values do not fit their header."""
        return replace(self.request, inputs=tuple(decoder() for decoder in self.decoders))


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A ModelInfer response."""

    model_name: str
    outputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
