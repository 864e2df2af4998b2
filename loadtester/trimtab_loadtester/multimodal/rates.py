"""Rates of multimodal requests over time, from a trace's counts per minute or synthetic.

A trace counts text and image requests together. Each minute is split by the image share of its hour if the trace has
hourly shares, else by one constant share. Within an hour text and image rates are therefore proportional, which is an
assumption.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.multimodal.traffic import BURST_SHARE, IMAGE_SHARE, Floats, Traffic
from trimtab_predictor.trace import TraceError

MINUTES_AN_HOUR: Final = 60
BURST_IMAGES: Final = 5_000
"""Images in the peak minute of an hour from which the hour belongs to a burst."""
BURST_HOURS: Final = (2.0, 10.0)
"""Minimum and maximum length of a burst in the trace."""
_TEXT_SPREAD, _IMAGE_SPREAD = 0.32, 0.45
"""Standard deviation of the logarithm of a rate between hours, fitted to the trace."""
_MINUTE_SPREAD: Final = 0.37
"""Standard deviation between minutes of each process; their sum then varies between consecutive minutes as the trace
does, 11 times as much as a Poisson process."""
_MINUTE_CORRELATION: Final = 0.74 ** (1 / MINUTES_AN_HOUR)
"""Autocorrelation of the hourly deviation between consecutive minutes; between consecutive hours it is 0.74."""
_TEXT, _IMAGES, _BURSTS = 1, 2, 3
_COLUMNS: Final = (
    "text_requests_per_min_read_off",
    "image_requests_per_min_by_difference",
    "images_per_min_peak_read_off",
)


@dataclass(frozen=True, slots=True, eq=False)
class HourlyRates:
    """Image share and bursts of a trace by hour."""

    image_shares: Floats
    """[H]"""
    bursts: NDArray[np.bool_]
    """[H]"""


def traffic_of(counts: Sequence[float] | Floats, hours: HourlyRates | None = None) -> Traffic:
    """Convert counts per minute, [M], to rates; None for hours is a constant image share without bursts."""
    rates = np.array(counts, dtype=np.float64) / 60
    if hours is None:
        return Traffic.split(rates)
    at = np.minimum(np.arange(rates.size) // MINUTES_AN_HOUR, hours.bursts.size - 1)
    return Traffic.split(rates, hours.image_shares[at], hours.bursts[at])


def synthetic_rates(minutes: int, seed: int) -> Traffic:
    """Draw rates with mean 1 request a second, the variance of the trace, and bursts of images that last for hours."""
    text = (1 - IMAGE_SHARE) * _log_normal_rates(minutes, _TEXT_SPREAD, (seed, _TEXT))
    image = IMAGE_SHARE * _log_normal_rates(minutes, _IMAGE_SPREAD, (seed, _IMAGES))
    return Traffic(text, image, _bursts(minutes, (seed, _BURSTS)))


def _log_normal_rates(minutes: int, spread: float, seed: Sequence[int]) -> Floats:
    """Draw log-normal rates with mean 1: an AR(1) process over hours, and independent noise by minute."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, spread * (1 - _MINUTE_CORRELATION**2) ** 0.5, minutes)
    slow, at = np.empty(minutes), float(random.normal(0, spread))
    for minute in range(minutes):
        slow[minute] = at = _MINUTE_CORRELATION * at + float(steps[minute])
    variance = spread**2 + _MINUTE_SPREAD**2
    return np.asarray(np.exp(slow + random.normal(0, _MINUTE_SPREAD, minutes) - variance / 2), dtype=np.float64)


def _bursts(minutes: int, seed: Sequence[int]) -> NDArray[np.bool_]:
    random = np.random.default_rng(seed)
    bursts, on = np.zeros(minutes, dtype=bool), bool(random.random() < BURST_SHARE)
    start = 0
    while start < minutes:
        hours = float(random.uniform(*BURST_HOURS)) * (1 if on else (1 - BURST_SHARE) / BURST_SHARE)
        end = start + max(1, round(MINUTES_AN_HOUR * hours))
        bursts[start:end] = on
        start, on = end, not on
    return bursts


def read_minutes(trace: Path) -> Floats:
    """Read the requests of each minute, the last number of each row; lines that begin with # are comments.

    Raises TraceError if the trace cannot be read, or no row ends with a number.
    """
    counts: Floats = _columns(trace, usecols=-1)
    counts = counts[np.isfinite(counts)]
    if not counts.size:
        raise TraceError(f"{trace}: no row ends with a number; each must end with the requests of a minute")
    return counts


def read_hours(trace: Path) -> HourlyRates:
    """Read a table of hours with text and image requests a minute and peak images a minute.

    Raises TraceError if the table cannot be read, or a column is missing.
    """
    table = _columns(trace, usecols=_COLUMNS, names=True)
    text_rates, image_rates, peaks = (table[name] for name in _COLUMNS)
    return HourlyRates(image_rates / np.maximum(text_rates + image_rates, 1e-9), peaks >= BURST_IMAGES)


def _columns(trace: Path, **layout: Any) -> NDArray[Any]:
    """Read columns of a CSV file, which may be compressed."""
    try:
        return np.atleast_1d(np.genfromtxt(trace, delimiter=",", **layout))
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        columns = f"; it needs {', '.join(_COLUMNS)}" if "names" in layout else ""
        raise TraceError(f"{trace} cannot be read: {error}{columns}") from error
