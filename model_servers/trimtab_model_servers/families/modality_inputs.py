"""What families of several modalities share: which of them a batch is answered from, and how a class is told.

What a point leaves out, or a request did not bring, is not replaced by zeros: nothing is computed for it.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from trimtab_model_servers.families.interfaces import Built
from trimtab_pipelines.operating_point import OperatingPoint


def select_inputs(inputs: Mapping[str, Tensor], point: OperatingPoint, modalities: Sequence[str]) -> dict[str, Tensor]:
    """Return those of a family's modalities that the point reads and the batch has, in the family's order.

    Raises:
        ValueError: there is none.
    """
    reads = point.modalities or tuple(modalities)
    found = {name: inputs[name] for name in modalities if name in reads and name in inputs}
    if not found:
        raise ValueError(f"there is nothing to answer from: give at least one of {', '.join(reads)}")
    return found


def classify(logits: Tensor) -> dict[str, Tensor]:
    """Map scores [B, classes] to `label` int64 [B] and `confidence` float32 [B], the probability of the label."""
    confidence, label = logits.softmax(dim=1).max(dim=1)
    return {"label": label, "confidence": confidence}


def built_from(network: object, random: bool) -> Built:  # noqa: FBT001 - where its weights came from
    """Say what was built."""
    return Built(network, "random" if random else "stored")  # type: ignore[arg-type]
