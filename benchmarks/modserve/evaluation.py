"""The paper's experiments: most load within the promise, step by step, over images, over promises, and a day's GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.modserve.cluster import SLO_FACTOR, Answered, Cluster, System
from benchmarks.modserve.paper import GPUS, IMAGE_GPUS, IMAGES, MONOLITHS, TEXT_GPUS, TEXTS, Profile
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE, Request, Traffic, draw

ATTAINMENT: Final = 0.99
"""P99 within the promise, in each kind of request."""
REQUESTS: Final = 8_000
HALVINGS: Final = 9
Draw = Callable[[float, int], list[Request]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to: seconds to the first token, mean and P99; the least share kept of a kind of requests."""

    mean_seconds: float
    p99_seconds: float
    attainment: float


def figures(answers: Sequence[Answered]) -> Figures:
    """Sum a run up; texts and images are judged apart, as the promise is."""
    seconds = np.array([one.seconds for one in answers])
    kinds = [[one.kept for one in answers if bool(one.request.images) is shown] for shown in (False, True)]
    kept = min((float(np.mean(kind)) for kind in kinds if kind), default=1.0)
    return Figures(float(seconds.mean()), float(np.quantile(seconds, 0.99, method="higher")), kept)


def sizes(system: System, gpus: int = GPUS, texts: int | None = None) -> tuple[int, int]:
    """Image and text instances as the paper divides them, or by so many text instances of 128 GPUs."""
    if not system.decoupled:
        return 0, MONOLITHS * gpus // GPUS
    chosen = TEXTS if texts is None else texts
    images = IMAGES if texts is None else (GPUS - chosen * TEXT_GPUS) // IMAGE_GPUS
    return max(1, images * gpus // GPUS), max(1, chosen * gpus // GPUS)


def mixture(rate: float, seed: int, *, images: int | None = None) -> list[Request]:
    """Requests at a steady rate, of the trace's images or of so many each; 0: text alone."""
    share = 0.0 if images == 0 else IMAGE_SHARE
    return draw(Traffic.steady(rate, REQUESTS / rate, share), seed, images=images)


def most_load(
    system: System, profile: Profile, size: tuple[int, int], drawn: Draw, seed: int, factor: float = SLO_FACTOR
) -> float:
    """Most requests a second with 99 of 100 of each kind in time; 0 where not even a trickle is."""

    def holds(rate: float) -> bool:
        asked = drawn(rate, seed)
        return figures(Cluster(system, profile, size, factor).run(asked)).attainment >= ATTAINMENT

    high = 4 * (size[0] / max(profile.encode, 1e-9) + size[1] / profile.prefill(100, 0))
    low = high / 4096
    if not holds(low):
        return 0.0
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def balanced(profile: Profile, drawn: Draw, seed: int) -> int:
    """The text instances (of 128 GPUs) with which both pools are equally busy, by the mean work of a request."""
    asked = drawn(1.0, seed)
    encode = sum(one.images for one in asked) * profile.encode_alone
    prefill = sum(profile.prefill(one.text_tokens, one.images) for one in asked)

    def carried(texts: int) -> float:
        return min((GPUS - texts * TEXT_GPUS) / max(encode, 1e-9), texts / prefill)

    return max(range(1, GPUS // TEXT_GPUS), key=carried)


def at_load(system: System, profile: Profile, size: tuple[int, int], rate: float, seed: int) -> Figures:
    """Seconds to the first token at a load."""
    return figures(Cluster(system, profile, size).run(mixture(rate, seed)))
