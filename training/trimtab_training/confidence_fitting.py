"""Fitting of calibrations: temperature, monotone curve, and expected calibration error."""

from typing import Final

import numpy as np
import torch.nn.functional as fn
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.families.digits_av.base import KNOTS

BINS: Final = 15
_BLOCKS: Final = KNOTS - 2
_TEMPERATURES: Final = np.geomspace(0.3, 3.0, 60).astype(np.float16).astype(np.float64)
"""Candidate temperatures, rounded to the type that stores them."""


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that minimizes the cross entropy of logits [n, classes] with labels [n] (Guo et al. 2017)."""
    losses = [float(fn.cross_entropy(logits / float(temperature), labels)) for temperature in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def fitted_curve(confidence: NDArray[np.floating], correct: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Fit a strictly rising curve from confidences [items] to accuracy, on items not trained on: knots [2, KNOTS].

    Each flat segment of an isotonic regression becomes one knot at its mean, so that the order of rows is kept (Oron
    and Flournoy, *The American Statistician* 2017).
    """
    from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - slow to import

    order = np.argsort(confidence, kind="stable")
    blocks = [block for block in np.array_split(order, _BLOCKS) if block.size]
    x, y, weight = np.array([(confidence[block].mean(), correct[block].mean(), block.size) for block in blocks]).T
    levels = IsotonicRegression().fit_transform(x, y, sample_weight=weight)
    segments = [np.flatnonzero(levels == level) for level in np.unique(levels)]
    means = [(np.average(x[segment], weights=weight[segment]), levels[segment[0]]) for segment in segments]
    inner = [(mean, level) for mean, level in means if 0.0 < mean < 1.0 and 0.0 < level < 1.0]
    knots = np.array([(0.0, 0.0), *inner, *[(1.0, 1.0)] * (KNOTS - 1 - len(inner))], dtype=np.float32)
    return knots.T.astype(np.float16).astype(np.float32)  # rounded as it is stored


def calibration_error(confidence: NDArray[np.floating], correct: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over equal-width bins (Guo et al. 2017)."""
    bin_of_item = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of_item, weights=correct.astype(np.float64) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / correct.size)
