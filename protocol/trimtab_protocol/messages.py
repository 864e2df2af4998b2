"""Inference requests and answers apart from any transport: what REST and gRPC both mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from trimtab_protocol.tensors import Tensor

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output the caller asked for by name; `parameters` as sent (`binary_data` over REST)."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One ModelInfer request. No requested outputs means all of them."""

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    requested_outputs: tuple[RequestedOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a tensor says of itself, before its values are looked at."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request whose tensors are described but not decoded, so that what nobody wants costs nothing.

    Args:
        request: all but the tensors.
        inputs: the tensors as described.
        slow: whether to decode it may take long enough to be felt by others.
        written_bytes: how much of it is written as JSON or typed contents, which costs many times its size.
        decoders: one for each tensor.
    """

    request: InferRequest
    inputs: tuple[TensorHeader, ...]
    slow: bool
    written_bytes: int
    decoders: tuple[Callable[[], Tensor], ...]

    @classmethod
    def of(cls, request: InferRequest) -> "PendingRequest":
        """One whose tensors are there already."""
        inputs = tuple(TensorHeader(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs)
        return cls(request, inputs, False, 0, tuple(partial(_same, tensor) for tensor in request.inputs))

    def decode(self) -> InferRequest:
        """Decode the tensors; raises ProtocolError where values do not fit their description."""
        return replace(self.request, inputs=tuple(decoder() for decoder in self.decoders))


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One ModelInfer answer."""

    model_name: str
    outputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
