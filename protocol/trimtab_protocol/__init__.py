"""Open Inference Protocol V2 over REST and gRPC: tensors, messages and their encodings."""

from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    PendingRequest,
    RequestedOutput,
    TensorHeader,
)
from trimtab_protocol.tensors import DTYPES, Buffer, Tensor

__all__ = [
    "DTYPES",
    "Buffer",
    "InferRequest",
    "InferResponse",
    "Parameter",
    "Parameters",
    "PendingRequest",
    "ProtocolError",
    "RequestedOutput",
    "Tensor",
    "TensorHeader",
]
