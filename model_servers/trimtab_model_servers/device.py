"""Devices: a model computes on a GPU if its variant requests one and torch finds one, else on the CPU."""

import logging
from collections.abc import Callable

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import CPU, MovesToDevice, Network
from trimtab_pipelines.model_spec import ModelSpec

GPU = torch.device("cuda")
log = logging.getLogger(__name__)


def idle_gpu(spec: ModelSpec) -> ModelError:
    """The error of a variant that requests a GPU which its family cannot use."""
    return ModelError(f"family {spec.family!r} computes on cores alone; remove resources.gpu, which would stay idle")


def move_to_device(
    spec: ModelSpec, network: Network, gpu_available: Callable[[], bool] = torch.cuda.is_available
) -> torch.device:
    """Move a network to its device, and return the device.

    Raises:
        ModelError: the variant requests a GPU that its family cannot use.
    """
    if not spec.gpus:
        return CPU
    if not isinstance(network, MovesToDevice):
        raise idle_gpu(spec)
    if not gpu_available():
        log.warning("model %s requests a GPU, but torch finds none: it computes on the CPU", spec.name)
        return CPU
    network.move_to(GPU)
    return GPU
