"""Input selection and classification output of multimodal families.

A modality that the operating point or the request leaves out is not computed; it is not replaced by zeros.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from trimtab_pipelines.operating_point import OperatingPoint


def select_inputs(inputs: Mapping[str, Tensor], point: OperatingPoint, modalities: Sequence[str]) -> dict[str, Tensor]:
    """The modalities that the operating point reads and the batch has, in the family's order.

    Raises:
        ValueError: none is left.
    """
    allowed = point.modalities or tuple(modalities)
    selected = {name: inputs[name] for name in modalities if name in allowed and name in inputs}
    if not selected:
        raise ValueError(f"the request has none of the inputs {', '.join(allowed)}; send at least one")
    return selected


def classify(logits: Tensor) -> dict[str, Tensor]:
    """Map scores [B, classes] to `label` int64 [B] and `confidence` float32 [B], the probability of the label."""
    confidence, label = logits.softmax(dim=1).max(dim=1)
    return {"label": label, "confidence": confidence}
