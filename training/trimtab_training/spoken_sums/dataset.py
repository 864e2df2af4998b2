"""Spoken sums with ground truth: two to four digits with plus, minus and times, read by one synthesised voice in noise.

Results are 0 to 99. Held-out sums have voices that training did not hear, and other babble; a held-out sum of three or
four digits is no sum of training.
"""

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from trimtab_training.digits_av.dataset import NAMES, coloured_noise
from trimtab_training.digits_av.formant_synthesis import RATE_HZ, VOICES, Floats, Split, synthesize_word, voice

WORDS: Final = (*NAMES, "plus", "minus", "times")
PLUS, TIMES = WORDS.index("plus"), WORDS.index("times")
RESULTS: Final = 100
DIGITS: Final = (2, 3, 4)
SNR_DB: Final = (-3.0, 17.0)
BABBLE_SHARE: Final = 0.4
"""Share of sums with other voices in the background, in place of noise."""
EVALUATION_SUMS, EVALUATION_SEED = 24_000, 33
_BABBLE_VOICES: Final = 20
_PAUSE_SECONDS: Final = (0.02, 0.14)
_EDGE_SECONDS: Final = (0.05, 0.25)
_LOUDNESS: Final = (0.06, 0.9)
_SOURCE: Final = {"train": 1, "held-out": 2}


@dataclass(frozen=True, slots=True, eq=False)
class SpokenSum:
    """A sum as text and as sound."""

    words: tuple[int, ...]
    """Indices into `WORDS`."""
    audio: Floats
    """Samples at 8 kHz, within ±1."""
    edges: NDArray[np.int64]
    """First sample of each word, and of the pause after it. Shape (words, 2)."""

    @property
    def text(self) -> str:
        return to_text(self.words)

    @property
    def result(self) -> int:
        return evaluate(self.words)

    def wav(self) -> bytes:
        """The content of a WAV file, 16 bits a sample."""
        file = io.BytesIO()
        soundfile.write(file, self.audio, RATE_HZ, format="WAV", subtype="PCM_16")
        return file.getvalue()


def to_text(words: Sequence[int]) -> str:
    return " ".join(WORDS[word] for word in words)


def evaluate(words: Sequence[int]) -> int:
    """Result of digits and signs in turn; times before plus and minus."""
    total, term = 0, words[0]
    for sign, digit in zip(words[1::2], words[2::2], strict=True):
        if sign == TIMES:
            term *= digit
        else:
            total, term = total + term, digit if sign == PLUS else -digit
    return total + term


def split_of(words: Sequence[int]) -> Split | None:
    """The only split that has a sum; None for sums of two digits, which both have."""
    if len(words) == 3:
        return None
    return "held-out" if zlib.crc32(bytes(words)) % 4 == 0 else "train"


def draw_words(split: Split, random: np.random.Generator) -> tuple[int, ...]:
    """Digits and signs of a sum of a split, with a result of 0 to 99."""
    count = int(random.choice(DIGITS))
    while True:
        words = np.empty(2 * count - 1, dtype=np.int64)
        words[::2], words[1::2] = random.integers(10, size=count), random.integers(PLUS, TIMES + 1, size=count - 1)
        drawn = tuple(words.tolist())
        if 0 <= evaluate(drawn) < RESULTS and split_of(drawn) in (None, split):
            return drawn


class SumSource:
    """Generator of spoken sums, deterministic in split, seed and index; it keeps the utterances of a split's voices."""

    def __init__(self, split: Split = "held-out", seed: int = 0) -> None:
        self._split: Split = split
        self._seed = seed
        self._utterances: dict[tuple[int, int], Floats] = {}

    def spoken(self, index: int) -> SpokenSum:
        random = np.random.default_rng([self._seed, index, _SOURCE[self._split]])
        words = draw_words(self._split, random)
        clean, edges = self._speech(words, random, VOICES[self._split])
        noise = self._babble(clean.size, random) if random.random() < BABBLE_SHARE else _noise(clean.size, random)
        level = np.sqrt(np.mean(clean**2) / 10 ** (random.uniform(*SNR_DB) / 10) / np.mean(noise**2))
        audio = clean + level * noise
        audio *= np.exp(random.uniform(*np.log(_LOUDNESS))) / np.abs(audio).max()
        return SpokenSum(words, audio.astype(np.float32), edges)

    def _speech(
        self, words: Sequence[int], random: np.random.Generator, voices: tuple[int, int]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Words of one voice with pauses, and their edges."""
        speaker = int(random.integers(*voices))
        pauses = random.uniform(*_PAUSE_SECONDS, len(words) + 1)
        pauses[[0, -1]] = random.uniform(*_EDGE_SECONDS, 2)
        silences: list[NDArray[np.float64]] = [np.zeros(int(pause * RATE_HZ)) for pause in pauses]
        spoken = silences[:1]
        for word, silence in zip(words, silences[1:], strict=True):
            said = self._utterance(speaker, word) * random.uniform(0.6, 1.0)
            spoken += [said.astype(np.float64), silence]
        return np.concatenate(spoken), np.cumsum([part.size for part in spoken])[:-1].reshape(-1, 2)

    def _babble(self, size: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Three voices that say digits at once."""
        first = VOICES[self._split][0]
        some = (first, first + _BABBLE_VOICES)
        voices = [self._speech(random.integers(10, size=9).tolist(), random, some)[0] for _ in range(3)]
        shifted = [np.resize(np.roll(each, int(random.integers(each.size))), size) for each in voices]
        return np.asarray(np.sum(shifted, axis=0))

    def _utterance(self, speaker: int, word: int) -> Floats:
        key = (speaker, word)
        if key not in self._utterances:
            self._utterances[key] = synthesize_word(word, voice(speaker), np.random.default_rng([79, *key]))
        return self._utterances[key]


def _noise(size: int, random: np.random.Generator) -> NDArray[np.float64]:
    """The first samples of noise whose length is a power of two: transforms of other lengths take ten times as long."""
    return coloured_noise(1 << (size - 1).bit_length(), random)[:size]


class EvaluationSums:
    """Held-out sums as samples of `trimtab evaluate`."""

    def __init__(self) -> None:
        self._source = SumSource("held-out", EVALUATION_SEED)

    def __len__(self) -> int:
        return EVALUATION_SUMS

    def __getitem__(self, index: int) -> tuple[dict[str, bytes], dict[str, str]]:
        spoken = self._source.spoken(index)
        return {"audio": spoken.wav()}, {"label": str(spoken.result)}
