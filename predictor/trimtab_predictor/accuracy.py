"""Forecast error: one definition for all evaluations."""

import numpy as np
from numpy.typing import ArrayLike


def smape(forecast_rps: ArrayLike, actual_rps: ArrayLike) -> float:
    """The symmetric mean absolute percentage error as a fraction, 0 (perfect) to 2.

    mean over i of 2·|f_i − a_i| / (|f_i| + |a_i|), pair by pair; a pair of zeros counts as 0.

    Raises:
        ValueError: shapes differ (numpy would silently compare all pairs), or there is nothing to compare.
    """
    forecast, actual = np.asarray(forecast_rps, np.float64), np.asarray(actual_rps, np.float64)
    if forecast.shape != actual.shape or forecast.ndim != 1 or not forecast.size:
        raise ValueError(f"SMAPE needs two equally long rows, not shapes {forecast.shape} and {actual.shape}")
    size = np.abs(forecast) + np.abs(actual)
    return float(np.mean(2 * np.abs(forecast - actual) / np.where(size > 0, size, 1.0)))
