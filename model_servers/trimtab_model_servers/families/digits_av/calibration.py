"""Calibrations: temperature and a monotone curve from a network's confidence to its accuracy.

One temperature scales all confidences alike; the curve corrects groups of rows that differ, such as hints and names. It
rises strictly, so that it keeps the order of rows. The training package fits both.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KNOTS: Final = 24
"""Knots of a stored curve, its ends included."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Map from one subset's scores to a confidence."""

    temperature: float
    """Divisor of the scores."""
    knots: NDArray[np.float32]
    """[2, KNOTS]: largest probabilities and their accuracies, both rising, linear between."""


def identity_calibration() -> NDArray[np.float32]:
    """The identity curve."""
    return np.tile(np.linspace(0.0, 1.0, KNOTS, dtype=np.float32), (2, 1))


def apply_calibration(knots: Tensor, confidence: Tensor) -> Tensor:
    """Map confidences [B] along a curve [2, KNOTS]."""
    x, y = knots.contiguous()
    left = torch.searchsorted(x, confidence.contiguous(), right=True).clamp(1, KNOTS - 1) - 1
    share = (confidence - x[left]) / (x[left + 1] - x[left]).clamp(min=1e-6)
    return torch.lerp(y[left], y[left + 1], share.clamp(0, 1))
