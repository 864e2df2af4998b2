"""Load of multimodal models: requests of text, and of images with text, as two processes apart.

Each has its own rate over time, its own sizes and its own seed: more images change no moment of a text. A burst is one
of images: at unchanged rates of requests those with more than one image come more often, for hours. The facts that
sizes and bursts follow are in `multimodal.sizes`; how the rates go, in `multimodal.rates`. Within an interval of the
rates arrivals are Poisson: of gaps between requests the trace's facts say nothing. Pure.
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
"""Of the trace's requests, those with images."""
BURST_SHARE: Final = 29 / 84
"""Of the trace's hours, those with a minute of 5,000 images and more."""
BURST_LIFT: Final = 2.1
"""In a burst requests of more than one image come so many times as often as on average, and otherwise so much less that
the average is the trace's: with it bursts show five times as many images a minute, as the peaks of its hours do."""
_TEXT, _IMAGES = 1, 2


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        arrival_seconds: from the start of the load.
        text_tokens: of its prompt, without those of its images.
        images: how many it shows.
        output_tokens: of its answer.
    """

    arrival_seconds: float
    text_tokens: int
    images: int
    output_tokens: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Rates of both processes over time.

    Attributes:
        text_rps, image_rps: [N], mean requests a second of each interval.
        bursts: [N], which intervals belong to a burst of images.
        interval_seconds: how long each is.
    """

    text_rps: Floats
    image_rps: Floats
    bursts: NDArray[np.bool_]
    interval_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.text_rps.size or not self.text_rps.shape == self.image_rps.shape == self.bursts.shape:
            shapes = f"{self.text_rps.shape}, {self.image_rps.shape} and {self.bursts.shape}"
            raise ValueError(
                f"rates of text and of images, and bursts, have {shapes}; each must say the same intervals"
            )

    @classmethod
    def split(
        cls, rps: Floats, image_shares: Floats | float = IMAGE_SHARE, bursts: NDArray[np.bool_] | None = None
    ) -> Self:
        """Both of what comes in each minute together, and the shares that have images."""
        calm = np.zeros(rps.size, dtype=bool)
        return cls(rps * (1 - image_shares), rps * image_shares, calm if bursts is None else bursts)

    @classmethod
    def steady(cls, rps: float, seconds: float, image_share: float = IMAGE_SHARE) -> Self:
        """Both at rates that never change."""
        return replace(cls.split(np.array([rps]), image_share), interval_seconds=seconds)

    def during(self, seconds: float) -> Self:
        """So many seconds of it, begun anew where it ends."""
        at = np.arange(max(1, int(np.ceil(seconds / self.interval_seconds)))) % self.text_rps.size
        return replace(self, text_rps=self.text_rps[at], image_rps=self.image_rps[at], bursts=self.bursts[at])

    @property
    def rps(self) -> Floats:
        """Of both together, [N]."""
        return self.text_rps + self.image_rps

    def scaled(self, mean_rps: float) -> Self:
        """The same with another mean of both together.

        Raises:
            ValueError: nothing comes, so that nothing can be scaled.
        """
        mean = float(self.rps.mean())
        if not mean > 0:
            raise ValueError("nothing comes in any interval, so that no rate can be scaled")
        return replace(self, text_rps=self.text_rps * mean_rps / mean, image_rps=self.image_rps * mean_rps / mean)


def draw(traffic: Traffic, seed: int, *, images: int | None = None, most_images: int = MAX_IMAGES) -> list[Request]:
    """Draw the requests of both processes, in the order of their arrival.

    Args:
        traffic: when how many come.
        seed: of all that is drawn.
        images: of every image request; None for as many as the trace's have.
        most_images: a request that would have more has so many.
    """
    return sorted(
        [*_texts(traffic, seed), *_shown(traffic, seed, images, most_images)], key=lambda one: one.arrival_seconds
    )


def _texts(traffic: Traffic, seed: int) -> list[Request]:
    arrivals = poisson_arrivals(traffic.text_rps, (seed, _TEXT), interval_seconds=traffic.interval_seconds)
    random = np.random.default_rng((seed, _TEXT, 1))
    contexts = TEXT_CONTEXTS.at(random.uniform(size=arrivals.size))
    outputs = TEXT_OUTPUTS.at(random.uniform(size=arrivals.size))
    return [
        Request(arrival, text, 0, output)
        for arrival, text, output in zip(arrivals.tolist(), contexts.tolist(), outputs.tolist(), strict=True)
    ]


def _shown(traffic: Traffic, seed: int, images: int | None, most_images: int) -> list[Request]:
    arrivals = poisson_arrivals(traffic.image_rps, (seed, _IMAGES), interval_seconds=traffic.interval_seconds)
    random = np.random.default_rng((seed, _IMAGES, 1))
    at = np.minimum((arrivals / traffic.interval_seconds).astype(np.int64), traffic.bursts.size - 1)
    ranks = _ranks(random, traffic.bursts[at], bursts_there=bool(traffic.bursts.any()))
    counts = np.minimum(images_at(ranks), most_images) if images is None else np.full(arrivals.size, images)
    outputs = IMAGE_OUTPUTS.at(random.uniform(size=arrivals.size))
    columns = (arrivals, text_tokens_with_images(ranks), counts, outputs)
    return [Request(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def several_share(*, burst: bool) -> float:
    """Of image requests, those with more than one image, in a burst and out of it; on average the trace's."""
    lift = BURST_LIFT if burst else (1 - BURST_SHARE * BURST_LIFT) / (1 - BURST_SHARE)
    return lift * (1 - ONE_IMAGE_SHARE)


def _ranks(random: np.random.Generator, burst: NDArray[np.bool_], *, bursts_there: bool) -> Floats:
    """Ranks of image requests among those of the trace; where no burst is, there is no calm either."""
    average = 1 - ONE_IMAGE_SHARE
    share = np.where(burst, several_share(burst=True), several_share(burst=False)) if bursts_there else average
    several, within = random.uniform(size=(2, burst.size))
    ranks = np.where(several < share, ONE_IMAGE_SHARE + average * within, ONE_IMAGE_SHARE * within)
    return np.asarray(ranks, dtype=np.float64)
