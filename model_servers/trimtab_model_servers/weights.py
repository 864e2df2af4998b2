"""Tensors from a safetensors file into a module, with errors that name the file, the tensor and what would be right."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights_source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec

Module = TypeVar("Module", bound=torch.nn.Module)
_COUNTER = "num_batches_tracked"  # of no use but to training; files often leave it out


def with_weights(spec: ModelSpec, construct: Callable[[], Module]) -> tuple[Module, bool]:
    """Construct a network with the weights of its `storageUri`; tell, too, whether they are random.

    It is constructed in memory, not on the meta device: whatever it keeps outside its state dict is then filled.

    Raises:
        ModelError: weights that are not there or are of another architecture.
    """
    weights = find_weights(spec.storage_uri, spec.digest)
    random = isinstance(weights, RandomSeed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weights.value if isinstance(weights, RandomSeed) else 0)
        network = construct()
    if not isinstance(weights, RandomSeed):
        load_weights(network, weights)
    return network.eval().requires_grad_(requires_grad=False), random


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Give a module the tensors of a file, in the module's own dtypes.

    The module may be on the meta device, if its state dict is all that it keeps.

    Raises:
        ModelError: the file is no safetensors file; a tensor is missing, superfluous or of another shape; or the
            module keeps on the meta device what no file holds.
    """
    wanted = module.state_dict()
    found = read_tensors(path)
    require_same(path, wanted, found)
    state = {
        name: found[name].to(tensor.dtype) if name in found else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in wanted.items()
    }
    module.load_state_dict(state, assign=True)
    kept = (*module.named_parameters(), *module.named_buffers())
    unfilled = [name for name, tensor in kept if tensor.is_meta]
    if unfilled:
        raise ModelError(
            f"{path}: no file holds {unfilled[0]!r}, and the meta device gave it no numbers; build the module elsewhere"
        )


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
