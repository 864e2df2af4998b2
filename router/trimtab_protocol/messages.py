"""Inference requests and answers apart from any transport: what REST and gRPC both mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
class InferResponse:
    """One ModelInfer answer."""

    model_name: str
    outputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
