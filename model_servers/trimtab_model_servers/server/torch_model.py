"""Models of torch: device, threads, and views of NumPy arrays as tensors and back."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np
import torch

from trimtab_model_servers.families.interfaces import MovesToDevice, Network
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.server.hosted_model import HostedModel, missing_gpu, unsupported_gpu
from trimtab_model_servers.weights.loading import CPU
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol.tensors import Array

GPU = torch.device("cuda")


def to_torch(array: Array) -> torch.Tensor:
    """View an array as a tensor; copies only read-only or unaligned arrays."""
    if not (array.flags.writeable and array.flags.aligned):
        array = array.copy()
    return torch.from_numpy(array)


def to_array(tensor: torch.Tensor | Array) -> Array:
    """View an output as an array; copies only if it is not contiguous or not in main memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    return np.ascontiguousarray(tensor.detach().cpu().numpy()) if tensor.dim() else tensor.numpy()


def move_to_device(
    spec: ModelSpec, network: Network, gpu_available: Callable[[], bool] = torch.cuda.is_available
) -> torch.device:
    """Move a network to its device, and return it; ModelError if a requested GPU cannot be used."""
    if not spec.gpus:
        return CPU
    if not isinstance(network, MovesToDevice):
        raise unsupported_gpu(spec)
    if not gpu_available():
        raise missing_gpu()
    network.move_to(GPU)
    return GPU


def run(
    network: Network,
    device: torch.device,
    inputs: Mapping[str, Array],
    point: OperatingPoint,
    names: Collection[str] | None = None,
) -> dict[str, Array]:
    """Run one batch in inference mode; return the named outputs, or all."""
    tensors = {name: array if array.dtype.hasobject else to_torch(array).to(device) for name, array in inputs.items()}
    with torch.inference_mode():
        outputs = network.infer(tensors, point)
    return {name: to_array(outputs[name]) for name in (outputs if names is None else names)}


def load(spec: ModelSpec) -> HostedModel:
    """Build a model with the threads of its core allocation, and move it to its device; raises ModelError. Blocks."""
    torch.set_num_threads(spec.threads)
    built = build(spec)
    device = move_to_device(spec, built.network)
    facts = {**built.facts, "device": device.type} if spec.gpus else built.facts
    return HostedModel(spec, built.network, built.weights, partial(run, built.network, device), facts)
