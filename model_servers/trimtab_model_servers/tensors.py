"""Conversion of tensors between the protocol's numpy arrays and torch, without copies if possible."""

import numpy as np
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_protocol import Tensor

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
DATATYPES = {dtype: datatype for datatype, dtype in TORCH_DTYPES.items()}


def torch_dtype(tensor: str, datatype: str) -> torch.dtype:
    """The torch dtype of a datatype; raises ModelError if torch has none."""
    dtype = TORCH_DTYPES.get(datatype)
    if dtype is None:
        raise ModelError(f"tensor {tensor!r}: torch has no {datatype}; use one of {', '.join(TORCH_DTYPES)}")
    return dtype


def to_torch(tensor: Tensor) -> torch.Tensor:
    """View a protocol tensor as a torch tensor; copies only read-only or unaligned arrays."""
    array = tensor.array
    if not (array.flags.writeable and array.flags.aligned):
        array = array.copy()
    return torch.from_numpy(array)


def to_wire(name: str, tensor: torch.Tensor) -> Tensor:
    """View a torch tensor as a protocol tensor; copies only if it is not contiguous or not in main memory."""
    array = np.ascontiguousarray(tensor.detach().cpu().numpy()) if tensor.dim() else tensor.numpy()
    return Tensor(name, DATATYPES[tensor.dtype], array)
