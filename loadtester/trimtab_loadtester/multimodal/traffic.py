"""Traffic of multimodal models: text requests and image requests as two independent processes.

Each process has its own rates, sizes and seed, so that a change of the image process leaves text requests unchanged.
During a burst, which lasts for hours, a larger share of image requests has more than one image, at unchanged request
rates. `multimodal.sizes` has the distributions of sizes, `multimodal.rates` the rates. Arrivals within an interval are
Poisson, since the trace has no interarrival times.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_loadtester.multimodal.sizes import (
    IMAGE_OUTPUTS,
    MAX_IMAGES,
    ONE_IMAGE_SHARE,
    TEXT_CONTEXTS,
    TEXT_OUTPUTS,
    images_at,
    text_tokens_with_images,
)

Floats = NDArray[np.float64]
IMAGE_SHARE: Final = 0.47
"""Share of the trace's requests with images."""
BURST_SHARE: Final = 29 / 84
"""Share of the trace's hours with a minute of at least 5,000 images."""
BURST_LIFT: Final = 2.1
"""Share of requests with more than one image in a burst, relative to the average share. Bursts then have five times as
many images a minute as other hours, as in the trace."""
_TEXT, _IMAGES = 1, 2


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    arrival_seconds: float
    """Seconds since the start of the load."""
    text_tokens: int
    """Prompt tokens without image tokens."""
    images: int
    output_tokens: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Rates of both processes over time."""

    text_rps: Floats
    """[N], mean requests a second in each interval."""
    image_rps: Floats
    """[N], mean requests a second in each interval."""
    bursts: NDArray[np.bool_]
    """[N], intervals that belong to a burst of images."""
    interval_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.text_rps.size or not self.text_rps.shape == self.image_rps.shape == self.bursts.shape:
            shapes = f"{self.text_rps.shape}, {self.image_rps.shape} and {self.bursts.shape}"
            raise ValueError(f"text rates, image rates and bursts have shapes {shapes}; they must be equal")

    @classmethod
    def split(
        cls, rps: Floats, image_shares: Floats | float = IMAGE_SHARE, bursts: NDArray[np.bool_] | None = None
    ) -> Self:
        """Split the rate of all requests by the share of image requests."""
        no_bursts = np.zeros(rps.size, dtype=bool)
        return cls(rps * (1 - image_shares), rps * image_shares, no_bursts if bursts is None else bursts)

    @classmethod
    def steady(cls, rps: float, seconds: float, image_share: float = IMAGE_SHARE) -> Self:
        return replace(cls.split(np.array([rps]), image_share), interval_seconds=seconds)

    def during(self, seconds: float) -> Self:
        """Return `seconds` of the traffic, repeated after its end."""
        at = np.arange(max(1, int(np.ceil(seconds / self.interval_seconds)))) % self.text_rps.size
        return replace(self, text_rps=self.text_rps[at], image_rps=self.image_rps[at], bursts=self.bursts[at])

    @property
    def rps(self) -> Floats:
        return self.text_rps + self.image_rps

    def scaled(self, mean_rps: float) -> Self:
        """Scale both rates to a mean of all requests. Raises ValueError if all rates are 0."""
        mean = float(self.rps.mean())
        if not mean > 0:
            raise ValueError("all rates are 0 and cannot be scaled")
        return replace(self, text_rps=self.text_rps * mean_rps / mean, image_rps=self.image_rps * mean_rps / mean)


def draw(traffic: Traffic, seed: int, *, images: int | None = None, max_images: int = MAX_IMAGES) -> list[Request]:
    """Draw the requests of both processes, in the order of their arrival.

    Without `images` for every image request, their number is drawn as in the trace, up to `max_images`.
    """
    requests = [*_text_requests(traffic, seed), *_image_requests(traffic, seed, images, max_images)]
    return sorted(requests, key=lambda request: request.arrival_seconds)


def _text_requests(traffic: Traffic, seed: int) -> list[Request]:
    arrivals = poisson_arrivals(traffic.text_rps, (seed, _TEXT), interval_seconds=traffic.interval_seconds)
    random = np.random.default_rng((seed, _TEXT, 1))
    contexts = TEXT_CONTEXTS.at(random.uniform(size=arrivals.size))
    outputs = TEXT_OUTPUTS.at(random.uniform(size=arrivals.size))
    return [
        Request(arrival, text, 0, output)
        for arrival, text, output in zip(arrivals.tolist(), contexts.tolist(), outputs.tolist(), strict=True)
    ]


def _image_requests(traffic: Traffic, seed: int, images: int | None, max_images: int) -> list[Request]:
    arrivals = poisson_arrivals(traffic.image_rps, (seed, _IMAGES), interval_seconds=traffic.interval_seconds)
    random = np.random.default_rng((seed, _IMAGES, 1))
    at = np.minimum((arrivals / traffic.interval_seconds).astype(np.int64), traffic.bursts.size - 1)
    ranks = _ranks(random, traffic.bursts[at], has_bursts=bool(traffic.bursts.any()))
    counts = np.minimum(images_at(ranks), max_images) if images is None else np.full(arrivals.size, images)
    outputs = IMAGE_OUTPUTS.at(random.uniform(size=arrivals.size))
    columns = (arrivals, text_tokens_with_images(ranks), counts, outputs)
    return [Request(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def several_share(*, burst: bool) -> float:
    """Share of image requests with more than one image, in a burst or outside; the average is that of the trace."""
    lift = BURST_LIFT if burst else (1 - BURST_SHARE * BURST_LIFT) / (1 - BURST_SHARE)
    return lift * (1 - ONE_IMAGE_SHARE)


def _ranks(random: np.random.Generator, burst: NDArray[np.bool_], *, has_bursts: bool) -> Floats:
    """Draw ranks of image requests; traffic without bursts has the average share of several images throughout."""
    average = 1 - ONE_IMAGE_SHARE
    share = np.where(burst, several_share(burst=True), several_share(burst=False)) if has_bursts else average
    several, within = random.uniform(size=(2, burst.size))
    ranks = np.where(several < share, ONE_IMAGE_SHARE + average * within, ONE_IMAGE_SHARE * within)
    return np.asarray(ranks, dtype=np.float64)
