"""Rates of multimodal requests over time, from a trace's counts per minute or synthetic.

A trace's counts are of texts and images together. Where its hours say how many were of either, each minute is split as
its hour; else by one share for all. Within an hour both thus rise and fall together; of that the facts say nothing.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.multimodal.traffic import BURST_SHARE, IMAGE_SHARE, Floats, Traffic
from trimtab_predictor.trace import TraceError

MINUTES_AN_HOUR: Final = 60
BURST_IMAGES: Final = 5_000
"""A minute of an hour shows so many images at its peak: the hour belongs to a burst."""
BURST_HOURS: Final = (2.0, 10.0)
"""How long bursts of the trace last."""
_TEXT_SPREAD, _IMAGE_SPREAD = 0.32, 0.45
"""Of the logarithm of a rate, from hour to hour: as the trace's hours vary."""
_MINUTE_SPREAD: Final = 0.37
"""The same from minute to minute, in each process: both together then vary as the trace's minutes do, 11 times as much
from one to the next as a Poisson process would."""
_FROM_MINUTE_TO_MINUTE: Final = 0.74 ** (1 / MINUTES_AN_HOUR)
"""How much of an hour's deviation the next minute has: hours have 0.74 of the one before."""
_TEXT, _IMAGES, _BURSTS = 1, 2, 3
_COLUMNS: Final = (
    "text_requests_per_min_read_off",
    "image_requests_per_min_by_difference",
    "images_per_min_peak_read_off",
)


@dataclass(frozen=True, slots=True, eq=False)
class HourlyRates:
    """What is known of a trace's hours, [H]: the share of image requests, and whether a burst of images was on."""

    image_shares: Floats
    bursts: NDArray[np.bool_]


def traffic_of(counts: Sequence[float], hours: HourlyRates | None = None) -> Traffic:
    """Rates of counts by the minute, [M]; without hours of them there are no bursts, and one share is of images."""
    rates = np.array(counts, dtype=np.float64) / 60
    if hours is None:
        return Traffic.split(rates)
    at = np.minimum(np.arange(rates.size) // MINUTES_AN_HOUR, hours.bursts.size - 1)
    return Traffic.split(rates, hours.image_shares[at], hours.bursts[at])


def synthetic_rates(minutes: int, seed: int) -> Traffic:
    """Rates about a mean of one request a second, as unsteady as the trace's, and bursts of hours between calm ones."""
    text = (1 - IMAGE_SHARE) * _unsteady(minutes, _TEXT_SPREAD, (seed, _TEXT))
    image = IMAGE_SHARE * _unsteady(minutes, _IMAGE_SPREAD, (seed, _IMAGES))
    return Traffic(text, image, _bursts(minutes, (seed, _BURSTS)))


def _unsteady(minutes: int, spread: float, seed: Sequence[int]) -> Floats:
    """Log-normal rates about 1: hours that drift, and minutes that jump."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, spread * (1 - _FROM_MINUTE_TO_MINUTE**2) ** 0.5, minutes)
    slow, at = np.empty(minutes), float(random.normal(0, spread))
    for minute in range(minutes):
        slow[minute] = at = _FROM_MINUTE_TO_MINUTE * at + float(steps[minute])
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


def read_minutes(trace: Path) -> list[float]:
    """Requests of each minute: the last number of each row; lines that begin with # are notes.

    Raises:
        TraceError: the trace cannot be read, or holds no minute.
    """
    found = [float(row[-1]) for row in _rows(trace) if row and _is_number(row[-1])]
    if not found:
        raise TraceError(f"{trace}: no row ends with a number; each must end with the requests of a minute")
    return found


def read_hours(trace: Path) -> HourlyRates:
    """What a trace's hours were like, of a table with requests of text and of images a minute, and a peak of images.

    Raises:
        TraceError: the table cannot be read, or a column is missing.
    """
    rows = _rows(trace)
    try:
        texts, shown, peaks = (np.array(column) for column in zip(*_hours(rows), strict=True))
    except (ValueError, KeyError, StopIteration) as error:
        raise TraceError(f"{trace}: {error!r}; it needs a header with {', '.join(_COLUMNS)}, and numbers") from error
    return HourlyRates(shown / np.maximum(texts + shown, 1e-9), peaks >= BURST_IMAGES)


def _hours(rows: Sequence[Sequence[str]]) -> Iterator[tuple[float, ...]]:
    heads = rows[0] if rows else []
    for row in rows[1:]:
        named: Mapping[str, str] = dict(zip(heads, row, strict=True))
        yield tuple(float(named[column]) for column in _COLUMNS)


def _rows(trace: Path) -> list[list[str]]:
    try:
        with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
            return list(csv.reader(line for line in file if not line.startswith("#")))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{trace} cannot be read: {error}") from error


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()
