"""Where a model computes: on a GPU where its variant asks for one and torch sees one, else on the cores."""

import logging
from collections.abc import Callable

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import CPU, MovesToDevice, Network
from trimtab_pipelines.model_spec import ModelSpec

GPU = torch.device("cuda")
log = logging.getLogger(__name__)


def idle_gpu(spec: ModelSpec) -> ModelError:
    """A variant asks for a GPU that its family would leave idle."""
    return ModelError(
        f"family {spec.family!r} computes on cores alone; take resources.gpu out, whose GPU it would leave idle"
    )


def placed(spec: ModelSpec, network: Network, gpu_seen: Callable[[], bool] = torch.cuda.is_available) -> torch.device:
    """Bring a network to where it computes, and tell where that is.

    Args:
        spec: of its variant.
        network: with its weights, in main memory.
        gpu_seen: whether torch sees a GPU.

    Raises:
        ModelError: the variant asks for a GPU, which its family would leave idle.
    """
    if not spec.gpus:
        return CPU
    if not isinstance(network, MovesToDevice):
        raise idle_gpu(spec)
    if not gpu_seen():
        log.warning("model %s asks for a GPU, but torch sees none: it computes on the cores", spec.name)
        return CPU
    network.place(GPU)
    return GPU
