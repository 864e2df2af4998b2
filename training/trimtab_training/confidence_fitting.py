"""Fitting of calibrations: temperature, monotone curve, and expected calibration error."""

from typing import Final

import numpy as np
import torch.nn.functional as fn
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.families.digits_av.calibration import KNOTS

BINS: Final = 15
_BLOCKS: Final = KNOTS - 2
_TEMPERATURES: Final = np.geomspace(0.3, 3.0, 60).astype(np.float16).astype(np.float64)
"""Candidate temperatures, rounded to the type that stores them."""


def best_temperature(logits: Tensor, digits: Tensor) -> float:
    """The temperature at which scores [n, 10] are likeliest to name the digits [n]."""
    losses = [float(fn.cross_entropy(logits / float(one), digits)) for one in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def fitted_curve(confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Fit the curve to items that were not trained on.

    Args:
        confidence: largest probability of each, 0…1. Shape (items,).
        right: whether it was that class. Shape (items,).
    """
    from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - slow to import

    order = np.argsort(confidence, kind="stable")
    blocks = [block for block in np.array_split(order, _BLOCKS) if block.size]
    x, y, weight = np.array([(confidence[block].mean(), right[block].mean(), block.size) for block in blocks]).T
    flat = IsotonicRegression().fit_transform(x, y, sample_weight=weight)
    pieces = [np.flatnonzero(flat == level) for level in np.unique(flat)]
    middle = [(np.average(x[piece], weights=weight[piece]), flat[piece[0]]) for piece in pieces]
    inner = [(at, level) for at, level in middle if 0.0 < at < 1.0 and 0.0 < level < 1.0]
    knots = np.array([(0.0, 0.0), *inner, *[(1.0, 1.0)] * (KNOTS - 1 - len(inner))], dtype=np.float32)
    return knots.T.astype(np.float16).astype(np.float32)  # as it is stored


def calibration_error(confidence: NDArray[np.floating], right: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over equal-width bins (Guo et al. 2017)."""
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(place, weights=right.astype(np.float64) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / right.size)
