"""Loads safetensors files into modules; errors name the file, the tensor and the expected shape."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec

CPU = torch.device("cpu")
Module = TypeVar("Module", bound=torch.nn.Module)
Config = TypeVar("Config", bound=BaseModel)
_COUNTER = "num_batches_tracked"  # used only by training; many files omit it


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers within the context; outside of it they do not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_with_weights(spec: ModelSpec, construct: Callable[[], Module]) -> tuple[Module, bool]:
    """Construct a network with the weights of its `storageUri`, frozen; return it, and whether they are random.

    Raises ModelError if the weights are unavailable, or of another architecture.
    """
    weights = find_weights(spec.storage_uri, spec.digest)
    with seeded(weights.value if isinstance(weights, RandomSeed) else 0):
        network = construct()
    if not isinstance(weights, RandomSeed):
        load_weights(network, weights)
    return network.eval().requires_grad_(requires_grad=False), isinstance(weights, RandomSeed)


def fuse_batch_norms(network: torch.nn.Module) -> None:
    """Fuse each batch norm into the convolution declared just before it, in place: fewer passes over memory."""
    for module in list(network.modules()):
        for (name, before), (norm_name, norm) in pairwise(list(module.named_children())):
            if isinstance(before, torch.nn.Conv2d) and isinstance(norm, torch.nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(before.eval(), norm.eval()))
                setattr(module, norm_name, torch.nn.Identity())


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Load a file into a module, in the module's dtypes.

    The module may be on the meta device if it has no tensors outside its state dict. Raises ModelError if the file is
    no safetensors file, a tensor does not fit, or one outside the state dict is on the meta device.
    """
    expected = module.state_dict()
    _, stored = read_file(path)
    require_same_tensors(path, expected, stored)
    state = {
        name: stored[name].to(tensor.dtype) if name in stored else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in expected.items()
    }
    module.load_state_dict(state, assign=True)
    tensors = (*module.named_parameters(), *module.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ModelError(f"{path}: {empty[0]!r} is in no file and on the meta device; construct the module in memory")


def read_file(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Read the metadata and every tensor of a safetensors file; raises ModelError if it is invalid."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a complete safetensors file ({error}); fetch or write it again") from error


def save_half(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file in float16, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    halved = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(halved, path, metadata=dict(metadata))


def load_configured(path: Path, configs: Mapping[str, type[Config]], build: Callable[[Config], Module]) -> Module:
    """Load a network whose file names its family and has its configuration as JSON; raises ModelError."""
    metadata, tensors = read_file(path)
    config = configs.get(metadata.get("family", ""))
    if config is None:
        raise ModelError(f"{path}: weights of family {metadata.get('family')!r}; expected {' or '.join(configs)}")
    try:
        network = build(config.model_validate_json(metadata.get("config", "")))
        network.load_state_dict(tensors)
    except (ValidationError, RuntimeError) as error:
        raise ModelError(f"{path}: not weights of these networks: {error}") from error
    return network


def require_same_tensors(path: Path, expected: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless a file's tensors have the expected names and shapes."""
    for name, tensor in expected.items():
        if name not in stored:
            if name.endswith(_COUNTER):
                continue
            raise ModelError(f"{path}: tensor {name!r} is missing; it must be there with shape {list(tensor.shape)}")
        if stored[name].shape != tensor.shape:
            raise ModelError(
                f"{path}: tensor {name!r} has shape {list(stored[name].shape)}; it must be {list(tensor.shape)}"
            )
    unknown = sorted(stored.keys() - expected.keys())
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]!r} is not part of this architecture ({len(unknown)} such tensors); "
            "are these the weights of another one?"
        )
