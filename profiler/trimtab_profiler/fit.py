"""Fit of the latency law l(b) = α·b² + β·b + γ (IPA, section 4.1) to measured batch sizes.

The fit minimizes the squared relative error, so that large batches do not dominate. Coefficients are constrained to be
non-negative if the law would be negative between the smallest and the largest batch. Latency need not grow with the
batch.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.profile import LatencyFit

Floats = NDArray[np.float64]
_SAMPLED_BATCHES = 257


def fit_latency(batch_sizes: Sequence[int], latencies_seconds: Sequence[float]) -> LatencyFit:
    """Fit the law to mean latencies, one for each distinct batch size.

    One point gives a constant, two a line through both, three or more a parabola. Raises ValueError if there are no
    points, or a batch size is repeated, or a value is not positive.
    """
    sizes, latencies = np.asarray(batch_sizes, dtype=np.float64), np.asarray(latencies_seconds, dtype=np.float64)
    if sizes.size == 0 or sizes.size != latencies.size:
        given = f"{sizes.size} batch sizes and {latencies.size} latencies"
        raise ValueError(f"{given}; give one latency for each, at least one")
    if np.unique(sizes).size != sizes.size or sizes.min() < 1:
        raise ValueError(f"batch sizes {list(batch_sizes)} must be distinct and at least 1")
    if not (np.isfinite(latencies).all() and latencies.min() > 0):
        raise ValueError(f"latencies {list(latencies_seconds)} must be above 0 and finite")
    powers = tuple(range(min(sizes.size, 3)))
    coefficients = _solve(sizes, latencies, powers)
    between = np.linspace(sizes.min(), sizes.max(), _SAMPLED_BATCHES)
    if np.polynomial.polynomial.polyval(between, coefficients).min() <= 0:
        coefficients = _solve_non_negative(sizes, latencies, powers)
    errors = relative_errors(coefficients, sizes, latencies)
    return LatencyFit(
        quadratic=float(coefficients[2]),
        linear=float(coefficients[1]),
        constant=float(coefficients[0]),
        mean_relative_error=float(np.abs(errors).mean()),
    )


def relative_errors(coefficients: Floats, sizes: Floats, latencies: Floats) -> Floats:
    """(fit − measured) / measured at each batch size; coefficients [3] of b⁰, b¹, b²."""
    errors: Floats = np.polynomial.polynomial.polyval(sizes, coefficients) / latencies - 1
    return errors


def _solve(sizes: Floats, latencies: Floats, powers: Sequence[int]) -> Floats:
    """Minimize Σ ((fit − measured) / measured)² over the coefficients of some powers; the others are 0."""
    scale = sizes.max()
    design = np.stack([(sizes / scale) ** power / latencies for power in powers], axis=1)
    solution = np.linalg.lstsq(design, np.ones_like(latencies), rcond=None)[0]
    coefficients = np.zeros(3)
    coefficients[list(powers)] = solution / scale ** np.asarray(powers)
    return coefficients


def _solve_non_negative(sizes: Floats, latencies: Floats, powers: Sequence[int]) -> Floats:
    """The best fit with non-negative coefficients, found exactly over all subsets of powers."""
    subsets = (subset for count in range(1, len(powers) + 1) for subset in combinations(powers, count))
    candidates = [_solve(sizes, latencies, subset) for subset in subsets]
    allowed = [coefficients for coefficients in candidates if coefficients.min() >= 0]
    return min(allowed, key=lambda c: float((relative_errors(c, sizes, latencies) ** 2).sum()))
