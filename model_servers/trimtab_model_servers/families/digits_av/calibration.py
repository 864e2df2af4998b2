"""Confidence that means what it says: a monotone map from what a network says of itself to how often it is right.

One temperature moves all that a network says alike. Hints and names, or voices heard well and hardly, want a curve: it
is found by isotonic regression and made strictly rising, so that it changes no order of rows: each flat piece becomes
one knot at its mean (centred isotonic regression; Oron and Flournoy, *The American Statistician* 2017).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KNOTS: Final = 24
"""Of a stored curve, its two ends among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What makes a subset's scores a confidence.

    Attributes:
        temperature: that scores are divided by.
        knots: largest probability, and how often that is right: both rising, straight lines between. Shape (2, KNOTS).
    """

    temperature: float
    knots: NDArray[np.float32]


def identity_calibration() -> NDArray[np.float32]:
    """The curve that changes nothing."""
    return np.tile(np.linspace(0.0, 1.0, KNOTS, dtype=np.float32), (2, 1))


def apply_calibration(knots: Tensor, confidence: Tensor) -> Tensor:
    """Map confidences [B] along a curve [2, KNOTS]."""
    x, y = knots.contiguous()
    left = torch.searchsorted(x, confidence.contiguous(), right=True).clamp(1, KNOTS - 1) - 1
    share = (confidence - x[left]) / (x[left + 1] - x[left]).clamp(min=1e-6)
    return torch.lerp(y[left], y[left + 1], share.clamp(0, 1))
