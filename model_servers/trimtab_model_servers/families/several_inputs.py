"""What families of several modalities share: which of them a batch is answered from, and how a class is told.

What a point leaves out, or a request did not bring, is not replaced by zeros: nothing is computed for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trimtab_model_servers.families.network import Built
from trimtab_model_servers.store import Seed, find_weights
from trimtab_model_servers.weights import load_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

Module = TypeVar("Module", bound=torch.nn.Module)


def given(inputs: Mapping[str, Tensor], point: OperatingPoint, modalities: Sequence[str]) -> dict[str, Tensor]:
    """Return those of a family's modalities that the point reads and the batch has, in the family's order.

    Raises:
        ValueError: there is none.
    """
    reads = point.modalities or tuple(modalities)
    found = {name: inputs[name] for name in modalities if name in reads and name in inputs}
    if not found:
        raise ValueError(f"there is nothing to answer from: give at least one of {', '.join(reads)}")
    return found


def told(logits: Tensor) -> dict[str, Tensor]:
    """Map scores [B, classes] to `label` int64 [B] and `certainty` float32 [B], the probability of the label."""
    certainty, label = logits.softmax(dim=1).max(dim=1)
    return {"label": label, "certainty": certainty}


def with_weights(spec: ModelSpec, construct: Callable[[], Module]) -> tuple[Module, bool]:
    """Construct a network with the weights of its `storageUri`; tell, too, whether they are random.

    Raises:
        ModelError: weights that are not there or are of another architecture.
    """
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, Seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(weights.value)
            network = construct()
    else:
        with torch.device("meta"):
            network = construct()
        load_weights(network, weights)
    return network.eval().requires_grad_(requires_grad=False), isinstance(weights, Seed)


def served(network: object, random: bool) -> Built:  # noqa: FBT001 - where its weights came from
    """Say what was built."""
    return Built(network, "random" if random else "stored")  # type: ignore[arg-type]
