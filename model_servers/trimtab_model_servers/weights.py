"""Tensors from a safetensors file into a module, with errors that name the file, the tensor and what would be right."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trimtab_model_servers.errors import ModelError

_COUNTER = "num_batches_tracked"  # of no use but to training; files often leave it out


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Give a module (which may be on the meta device) the tensors of a file, in the module's own dtypes.

    Raises:
        ModelError: the file is no safetensors file, or a tensor is missing, superfluous or of another shape.
    """
    wanted = module.state_dict()
    found = read_tensors(path)
    require_same(path, wanted, found)
    state = {
        name: found[name].to(tensor.dtype) if name in found else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in wanted.items()
    }
    module.load_state_dict(state, assign=True)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file; raises ModelError where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); fetch or write it anew") from error


def require_same(path: Path, wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless a file's tensors are those wanted, in name and shape."""
    for name, tensor in wanted.items():
        if name not in found:
            if name.endswith(_COUNTER):
                continue
            raise ModelError(f"{path}: tensor {name!r} is missing; it must be there with shape {list(tensor.shape)}")
        if found[name].shape != tensor.shape:
            raise ModelError(
                f"{path}: tensor {name!r} has shape {list(found[name].shape)}; it must be {list(tensor.shape)}"
            )
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]!r} is not part of this architecture ({len(unknown)} such tensors); "
            "are these the weights of another one?"
        )
