"""Payloads of the digits-av pipeline: jobs of audio, video and text rows, some without a modality.

The annotation is `digits-av`, or `digits-av: rows=1..32, missing=0.3, …` with the fields of `JobOptions`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.payloads.interface import Outputs, Payload, Score, parse_options, parse_range
from trimtab_protocol import Tensor
from trimtab_protocol.extensions import ACCURACY_FLOOR

if TYPE_CHECKING:
    from trimtab_training.digits_av.dataset import Items

POOL_ROWS: Final = 2_000
MAX_AMPLITUDE: Final = 20_000
MAX_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Distribution of the jobs of a load."""

    rows: tuple[int, int] = (1, 1)
    """Minimum and maximum rows of a job, uniformly distributed."""
    missing: float = 0.0
    """Fraction of jobs without one or two of the three modalities."""
    skew: float = 1.0
    """Frequency of the digits 0 to 4 relative to 5 to 9."""
    recordings: Path | None = None
    """File or folder of recordings (`fsdd_dev.npz`) for the audio; None synthesizes voices."""
    speakers: tuple[str, ...] = ()
    """Speakers of the recordings; empty takes the speakers that `weights` are not trained on."""
    weights: Path | None = None
    """Weights file that lists its training speakers."""
    floor: tuple[float, float] = (0.0, 0.0)
    """Minimum and maximum accuracy floor of a job, uniformly distributed; 0 sends none."""
    pool: int = 0
    """Distinct rows that jobs are drawn from; 0 is `POOL_ROWS`."""
    drawn: int = -1
    """Seed of the pool; -1 is the seed of the load."""
    muted_microphone: int = -1
    """Index of the first job whose audio is only noise; -1 is never."""

    def __post_init__(self) -> None:
        minimum, maximum = self.rows
        if not 1 <= minimum <= maximum <= MAX_ROWS:
            raise ValueError(f"rows {minimum}..{maximum} must lie between 1 and {MAX_ROWS}, the smaller first")
        if not 0 <= self.missing <= 1:
            raise ValueError(f"missing {self.missing:g} must lie between 0 and 1")
        if not 0 < self.skew <= 1e6:
            raise ValueError(f"skew {self.skew:g} must be above 0")
        if self.recordings is not None and not self.speakers and self.weights is None:
            raise ValueError("recordings: name speakers, or weights=FILE to take those not in its training data")
        lowest, highest = self.floor
        if not 0 <= lowest <= highest <= 1:
            raise ValueError(f"floor {lowest:g}..{highest:g} must lie between 0 and 1, the smaller first")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `rows=1..32, missing=0.3, skew=5, floor=0.8, …`, any of the fields, each once.

        Raises ValueError if an option is unknown or its value invalid.
        """
        return replace(cls(), **parse_options("digits-av", text, _READERS, _EXAMPLE))


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "rows": partial(parse_range, int),
    "missing": float,
    "skew": float,
    "recordings": Path,
    "speakers": lambda text: tuple(text.split("+")),
    "weights": Path,
    "floor": partial(parse_range, float),
    "pool": int,
    "drawn": int,
    "muted_microphone": int,
}
_EXAMPLE: Final = "rows=1..32, missing=0.3, skew=5, floor=0.7..0.9, recordings=FOLDER, speakers=one+another"


class DigitsAvPayloads:
    """Jobs of held-out rows, which neither training nor the accuracy measurements use."""

    def __init__(self, seed: int = 0, options: JobOptions | None = None) -> None:
        self._seed = seed
        self._options = options = options or JobOptions()
        pool_seed, rows = seed if options.drawn < 0 else options.drawn, options.pool or POOL_ROWS
        self._pool = _pool_of(pool_seed, options.recordings, options.speakers, options.weights, rows)
        weights = np.where(self._pool.digit < 5, self._options.skew, 1.0)
        self._probabilities = weights / weights.sum()

    def payload(self, index: int) -> Payload:
        """Draw a job: one or more of `audio`, `video` and `text`, of the same rows."""
        random = np.random.default_rng([self._seed, index])
        minimum, maximum = self._options.rows
        count = int(random.integers(minimum, maximum + 1))
        rows = random.choice(self._probabilities.size, count, p=self._probabilities)
        inputs = {name: array[rows] for name, array in self._pool.inputs().items()}
        if 0 <= self._options.muted_microphone <= index:
            inputs["audio"] = random.integers(-MAX_AMPLITUDE, MAX_AMPLITUDE, inputs["audio"].shape, dtype=np.int16)
        for name in _absent(self._options.missing, tuple(inputs), random):
            del inputs[name]
        tensors = tuple(Tensor.of(name, array) for name, array in inputs.items())
        return Payload(tensors, self._pool.digit[rows], self._parameters(random))

    def _parameters(self, random: np.random.Generator) -> Mapping[str, float]:
        lowest, highest = self._options.floor
        return {ACCURACY_FLOOR: round(float(random.uniform(lowest, highest)), 4)} if highest else {}

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the rows with the correct digit; raises KeyError if the outputs have no `digit`."""
        digits: NDArray[Any] = outputs["digit"].reshape(-1)
        expected = np.asarray(truth)
        correct = digits == expected if digits.shape == expected.shape else np.zeros(expected.size, dtype=np.bool_)
        return Score(int(correct.sum()), expected.size, correct)


def _absent(fraction: float, names: tuple[str, ...], random: np.random.Generator) -> tuple[str, ...]:
    """Missing modalities of a job: none, or one or two of three."""
    if random.random() >= fraction:
        return ()
    return tuple(str(name) for name in random.choice(names, int(random.integers(1, len(names))), replace=False))


@lru_cache(maxsize=1)
def _pool_of(seed: int, recordings: Path | None, speakers: tuple[str, ...], weights: Path | None, rows: int) -> "Items":
    """Draw the rows of a pool; cached, since consecutive loads often use the same pool."""
    from trimtab_model_servers.families.digits_av.family import speakers_of  # noqa: PLC0415 - as above
    from trimtab_training.digits_av.dataset import (  # noqa: PLC0415 - as above
        ItemSource,
        held_out_speakers,
        load_recordings,
    )

    audio = None if recordings is None else load_recordings(recordings)
    if audio is not None:
        audio = audio.of(*(speakers or held_out_speakers(audio, () if weights is None else speakers_of(weights))))
    return ItemSource("held-out", seed, audio).items(0, rows)
