"""Payloads of the digits-av pipeline: jobs of audio, video and text rows, some without a modality.

The annotation reads `digits-av`, or `digits-av: rows=1..32, missing=0.3, …` with the fields of `JobOptions`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_protocol import Tensor
from trimtab_protocol.extensions import ACCURACY_FLOOR

if TYPE_CHECKING:
    from trimtab_training.digits_av.dataset import Items

POOL_ROWS: Final = 2_000
LOUDEST: Final = 20_000
MAX_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What jobs look like.

    Attributes:
        rows: least and most rows of a job; each number is as likely.
        missing: share of jobs without one or two of the three modalities.
        skew: how many times as often the digits 0 to 4 come as 5 to 9.
        recordings: file or folder of real recordings (`fsdd_dev.npz`) to take the sound from, else synthesised voices.
        speakers: of the recordings, whom to take; else those that `weights` have not learned from.
        weights: a file of weights that says whom it has heard.
        floor: least and most accuracy that a job asks for, each as likely; 0 where it asks for none.
        pool: rows that are drawn; jobs are different choices among them.
        drawn: the seed of these rows; else that of the load, so that each seed has rows of its own.
        deaf: the job from which on the microphone is broken and gives noise alone; never where negative.
    """

    rows: tuple[int, int] = (1, 1)
    missing: float = 0.0
    skew: float = 1.0
    recordings: Path | None = None
    speakers: tuple[str, ...] = ()
    weights: Path | None = None
    floor: tuple[float, float] = (0.0, 0.0)
    pool: int = 0
    drawn: int = -1
    deaf: int = -1

    def __post_init__(self) -> None:
        least, most = self.rows
        if not 1 <= least <= most <= MAX_ROWS:
            raise ValueError(f"rows {least}..{most} must lie between 1 and {MAX_ROWS}, the lesser first")
        if not 0 <= self.missing <= 1:
            raise ValueError(f"missing {self.missing:g} is a share, between 0 and 1")
        if not 0 < self.skew <= 1e6:
            raise ValueError(f"skew {self.skew:g} must be above 0")
        if self.recordings is not None and not self.speakers and self.weights is None:
            raise ValueError("recordings: name speakers, or weights=FILE for those that these have not heard")
        lowest, highest = self.floor
        if not 0 <= lowest <= highest <= 1:
            raise ValueError(f"floor {lowest:g}..{highest:g} must lie between 0 and 1, the lesser first")

    @classmethod
    def parse(cls, written: str) -> Self:
        """Read `rows=1..32, missing=0.3, skew=5, floor=0.8, …`, any of the fields, each once.

        Raises:
            ValueError: no such option, or a value that cannot be.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in written.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name not in _READERS or name in values:
                raise ValueError(
                    f"payloads digits-av: {part!r} is not one of {', '.join(_READERS)}, each once as NAME=VALUE"
                )
            try:
                values[name] = _READERS[name](value)
            except ValueError:
                raise ValueError(
                    f"payloads digits-av: {name} cannot be {value!r}; write for instance {_EXAMPLE}"
                ) from None
        return replace(cls(), **values)


Value = TypeVar("Value", int, float)


def _range(kind: Callable[[str], Value], written: str) -> tuple[Value, Value]:
    least, dots, most = written.partition("..")
    return kind(least), kind(most if dots else least)


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "rows": partial(_range, int),
    "missing": float,
    "skew": float,
    "recordings": Path,
    "speakers": lambda written: tuple(written.split("+")),
    "weights": Path,
    "floor": partial(_range, float),
    "pool": int,
    "drawn": int,
    "deaf": int,
}
_EXAMPLE: Final = "rows=1..32, missing=0.3, skew=5, floor=0.7..0.9, recordings=FOLDER, speakers=one+another"


class DigitsAvPayloads:
    """Jobs of rows whose handwriting and voices neither training nor the measured accuracies have drawn this way."""

    def __init__(self, seed: int = 0, options: JobOptions | None = None) -> None:
        self._seed = seed
        self._options = options = options or JobOptions()
        own = seed if options.drawn < 0 else options.drawn
        self._pool = _drawn(own, options.recordings, options.speakers, options.weights, options.pool or POOL_ROWS)
        weights = np.where(self._pool.digit < 5, self._options.skew, 1.0)
        self._likely = weights / weights.sum()

    def payload(self, index: int) -> Payload:
        """Draw a job: some of `audio`, `video`, `text`, all of the same rows."""
        random = np.random.default_rng([self._seed, index])
        least, most = self._options.rows
        rows = random.choice(self._likely.size, int(random.integers(least, most + 1)), p=self._likely)
        inputs = {name: array[rows] for name, array in self._pool.inputs().items()}
        if 0 <= self._options.deaf <= index:
            inputs["audio"] = random.integers(-LOUDEST, LOUDEST, inputs["audio"].shape, dtype=np.int16)
        for name in _absent(self._options.missing, tuple(inputs), random):
            del inputs[name]
        tensors = tuple(Tensor.of(name, array) for name, array in inputs.items())
        return Payload(tensors, self._pool.digit[rows], self._parameters(random))

    def _parameters(self, random: np.random.Generator) -> Mapping[str, float]:
        lowest, highest = self._options.floor
        return {ACCURACY_FLOOR: round(float(random.uniform(lowest, highest)), 4)} if highest else {}

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the rows whose digit is named; KeyError where the answer has no `digit`."""
        digits: NDArray[Any] = outputs["digit"].reshape(-1)
        expected = np.asarray(truth)
        right = digits == expected if digits.shape == expected.shape else np.zeros(expected.size, dtype=np.bool_)
        return Score(int(right.sum()), expected.size, right)


def _absent(share: float, names: tuple[str, ...], random: np.random.Generator) -> tuple[str, ...]:
    """Missing modalities of a job: none, or one or two of three."""
    if random.random() >= share:
        return ()
    return tuple(str(name) for name in random.choice(names, int(random.integers(1, len(names))), replace=False))


@lru_cache(maxsize=1)
def _drawn(seed: int, recordings: Path | None, speakers: tuple[str, ...], weights: Path | None, rows: int) -> "Items":
    """The rows that jobs are made of; kept, since several loads after each other may be made of the same."""
    from trimtab_model_servers.families.digits_av.variants import speakers_of  # noqa: PLC0415 - as above
    from trimtab_training.digits_av.dataset import ItemSource  # noqa: PLC0415 - slow to import
    from trimtab_training.digits_av.recorded_digits import held_out_speakers, load_recordings  # noqa: PLC0415 - as above

    found = None if recordings is None else load_recordings(recordings)
    if found is not None:
        found = found.of(*(speakers or held_out_speakers(found, () if weights is None else speakers_of(weights))))
    return ItemSource("held-out", seed, found).items(0, rows)
