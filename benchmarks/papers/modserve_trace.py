"""Rates of multimodal requests over time, from a trace's counts per minute.

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

from trimtab_loadtester.multimodal.rates import MINUTES_AN_HOUR
from trimtab_loadtester.multimodal.traffic import Floats, Traffic
from trimtab_predictor.trace import TraceError

BURST_IMAGES: Final = 5_000
"""Images in the peak minute of an hour from which the hour belongs to a burst."""
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
