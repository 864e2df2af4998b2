"""Two processes: requests of text, and of images with text. Sizes as in the trace of the paper, bursts in images.

Text sizes are drawn between the quantiles that are known of the trace (Azure LMM inference trace 2025, CC BY 4.0; Qiu
et al. 2025), images by its steps up to 16, the most that the paper's evaluation takes.
"""

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.trace import TraceError

TRACE: Final = "azure_lmm_per_minute_dev.csv.gz"
IMAGE_SHARE: Final = 0.47
_TEXT_QUANTILES: Final = (
    (0.0, 40), (0.01, 71), (0.02, 113), (0.05, 136), (0.1, 175), (0.2, 305), (0.25, 368), (0.3, 439), (0.4, 598),
    (0.5, 779), (0.6, 993), (0.7, 1267), (0.75, 1446), (0.8, 1765), (0.85, 2201), (0.9, 3066), (0.92, 3500),
    (0.94, 3824), (0.95, 4132), (0.96, 5097), (0.97, 5819), (0.98, 7179), (0.99, 14080), (1.0, 20000),
)  # fmt: skip
_QUANTILES: Final = np.array(_TEXT_QUANTILES)
_IMAGES: Final = (1, 4, 9, 16)
_IMAGE_WEIGHTS: Final = (0.660, 0.047, 0.149, 0.019)
BURST_FACTOR: Final = 6.0
"""In a burst requests of more than one image come so many times as often, and those of one so much less."""


Minutes = tuple[list[float], list[bool]]
"""The rate of each minute, about a mean of 1, and whether it belongs to a burst of images."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes (seconds), its own tokens of text, its images."""

    arrival: float
    text_tokens: int
    images: int


def requests(
    rates: Sequence[float],
    second: float,
    seed: int,
    *,
    image_share: float = IMAGE_SHARE,
    images: int | None = None,
    bursts: Sequence[bool] = (),
    prompt_tokens: int = 100,
) -> list[Request]:
    """Draw requests, Poisson within each interval.

    Args:
        rates: mean requests a second of each interval.
        second: length of an interval.
        seed: of all that is drawn.
        image_share: of requests with images.
        images: of each such request; None for the trace's mixture.
        bursts: which intervals belong to a burst of images.
        prompt_tokens: of text beside images.
    """
    random = np.random.default_rng(seed)
    found: list[Request] = []
    for at, rate in enumerate(rates):
        count = int(random.poisson(rate * second))
        arrivals = np.sort(at * second + random.uniform(0, second, count))
        shown = (
            _images(random, count, burst=at < len(bursts) and bursts[at]) if images is None else np.full(count, images)
        )
        shown = np.where(random.uniform(size=count) < image_share, shown, 0)
        texts = np.interp(random.uniform(size=count), _QUANTILES[:, 0], _QUANTILES[:, 1])
        texts = np.where(shown > 0, prompt_tokens * random.lognormal(0, 0.5, count), texts)
        found += [
            Request(float(arrival), max(1, int(text)), int(image))
            for arrival, text, image in zip(arrivals, texts, shown, strict=True)
        ]
    return found


def _images(random: np.random.Generator, count: int, *, burst: bool) -> NDArray[np.int64]:
    weights = np.array(_IMAGE_WEIGHTS)
    if burst:
        weights = weights * np.array([1.0, *[BURST_FACTOR] * (len(weights) - 1)])
    return random.choice(_IMAGES, size=count, p=weights / weights.sum())


def minutes(trace: Path | None, count: int, seed: int) -> Minutes:
    """Rates of each minute about a mean of 1, and which belong to the burst: a third of them, in the middle.

    Raises:
        TraceError: the trace cannot be read, has fewer minutes, or nothing comes in them.
    """
    rates = _made_up(count, seed) if trace is None else _of_trace(trace, count)
    mean = sum(rates) / len(rates)
    if not mean > 0:
        raise TraceError(f"{trace}: in its first {count} minutes there are no requests, so that none can be scaled")
    return [rate / mean for rate in rates], [count // 3 <= at < 2 * count // 3 for at in range(count)]


def _of_trace(trace: Path, count: int) -> list[float]:
    """Requests of each minute: the last number of each row; lines that begin with # are notes."""
    try:
        with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
            rows = list(csv.reader(line for line in file if not line.startswith("#")))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{trace} cannot be read: {error}") from error
    found = [float(row[-1]) for row in rows if row and _is_number(row[-1])]
    if len(found) < count:
        raise TraceError(f"{trace}: {len(found)} minutes of requests; at least {count} are needed")
    return found[:count]


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()


def _made_up(count: int, seed: int) -> list[float]:
    random = np.random.default_rng(seed)
    value, found = 0.0, []
    for _ in range(count):
        value = 0.9 * value + random.normal(0, 0.15)
        found.append(float(np.exp(value)))
    return found
