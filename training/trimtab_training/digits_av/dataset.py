"""Items with ground truth: one digit as audio, video and text, each degraded so that all modalities matter.

- audio: a spoken digit within 0.8 s at 8 kHz, in coloured noise at a random signal-to-noise ratio;
- video: four grainy frames of one handwritten digit that moves and rotates; a bar hides part of each frame;
- text: six characters with typing errors: the digit's name or, more often, a hint (odd, even, low, high).

Splits share no image of handwriting, no synthesised voice and no speaker.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.families.digits_av import CHARACTERS, FRAMES, SAMPLES, SIDE_PX
from trimtab_training.digits.datasets import load_datasets, sample
from trimtab_training.digits_av.formant_synthesis import RATE_HZ, VOICES, Split, synthesize_word, voice

NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HINT_SHARE: Final = 0.7
TYPO_SHARE: Final = 0.12
SNR_DB: Final = {"recorded": (-12.0, 4.0), "synthesised": (-17.0, -1.0)}
"""Range of signal-to-noise ratios; synthesised voices are clearer than real ones."""
BAR_PX: Final = 5
GRAIN: Final = (0.15, 0.5)
"""Range of the standard deviation of a frame's noise."""

_SOURCE: Final = {"train": 1, "held-out": 2}
_LOUDNESS: Final = (2_000.0, 26_000.0)
FILE: Final = "fsdd_dev.npz"
"""Optional file of clips of the Free Spoken Digit Dataset (CC BY-SA 4.0) at 8 kHz: `samples` (int16, concatenated),
`offsets`, `digit`, `speaker` and `speaker_names`. The licence applies to weights trained on them."""


@dataclass(frozen=True, slots=True, eq=False)
class Recordings:
    """Clips of some speakers."""

    clips: tuple[NDArray[np.float32], ...]
    """Samples at 8 kHz, mean 0, peak 1; lengths differ."""
    digits: NDArray[np.int64]
    """[n], the spoken digit."""
    speakers: NDArray[np.int64]
    """[n], indices into `names`."""
    names: tuple[str, ...]
    """All speakers of the file."""
    source: str
    """Name of the file."""

    @property
    def present(self) -> tuple[str, ...]:
        """Speakers with clips, in order."""
        return tuple(self.names[n] for n in sorted(set(self.speakers.tolist())))

    def of(self, *names: str) -> "Recordings":
        """Clips of some speakers; KeyError if one is unknown."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise KeyError(f"no speaker {unknown[0]!r} in these recordings; speakers: {', '.join(self.names)}")
        rows = np.flatnonzero(np.isin(self.speakers, [self.names.index(name) for name in names]))
        return Recordings(
            tuple(self.clips[row] for row in rows), self.digits[rows], self.speakers[rows], self.names, self.source
        )


def training_speakers(recordings: Recordings) -> tuple[str, ...]:
    """Speakers that the shipped weights are trained on: all but the last.

    Raises ValueError if there are fewer than two speakers.
    """
    speakers = recordings.present
    if len(speakers) < 2:
        raise ValueError(
            f"{recordings.source}: recordings of {len(speakers)} speakers; at least two are needed, because each is "
            "measured with weights trained on the others"
        )
    return speakers[:-1]


def held_out_speakers(recordings: Recordings, trained: Collection[str]) -> tuple[str, ...]:
    """Speakers that weights were not trained on; ValueError if there are none."""
    speakers = tuple(name for name in recordings.present if name not in trained)
    if not speakers:
        raise ValueError(
            f"the weights were trained on every speaker of these recordings ({', '.join(recordings.present)}); "
            "name the speakers to use, or give recordings of others"
        )
    return speakers


def load_recordings(path: Path) -> Recordings:
    """Read a file of recordings, or the one in a folder.

    Raises FileNotFoundError if the file is missing. Raises ValueError if the file lacks an array.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no recordings; give {FILE} or the folder that holds it")
    with np.load(file, allow_pickle=False) as arrays:
        missing = sorted({"samples", "offsets", "digit", "speaker", "speaker_names"} - set(arrays.files))
        if missing:
            raise ValueError(f"{file}: no array {missing[0]!r}; it should be a file of spoken digits")
        samples, offsets = arrays["samples"], arrays["offsets"]
        clips = tuple(_normalize(samples[a:b]) for a, b in pairwise(offsets.tolist()))
        names = tuple(str(name) for name in arrays["speaker_names"])
        return Recordings(clips, arrays["digit"].astype(np.int64), arrays["speaker"].astype(np.int64), names, file.name)


def _normalize(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    centred = samples.astype(np.float32) - np.float32(samples.mean())
    return centred / np.float32(max(float(np.abs(centred).max()), 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Rows of three modalities with their labels."""

    audio: NDArray[np.int16]
    """[n, 6400]."""
    video: NDArray[np.uint8]
    """[n, 4, 24, 24]."""
    text: NDArray[np.uint8]
    """[n, 6], ASCII, padded with 0."""
    digit: NDArray[np.int64]
    """[n]."""

    def inputs(self) -> dict[str, NDArray[Any]]:
        return {"audio": self.audio, "video": self.video, "text": self.text}


class ItemSource:
    """Generator of items, deterministic in split, seed, recordings and index.

    `split`: of handwriting and voices. `seed`: of the draws. `recordings`: clips that replace the synthesised voices,
    already restricted to the split's speakers. `part`: (index, count) of the disjoint parts of the split's handwriting.
    """

    def __init__(
        self,
        split: Split = "held-out",
        seed: int = 0,
        recordings: Recordings | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.split: Split = split
        self.seed = seed
        self.recordings = recordings
        self._snr_db = SNR_DB["synthesised" if recordings is None else "recorded"]
        handwriting = load_datasets(split)
        self._glyphs = handwriting.glyphs
        index, count = part
        self.glyphs_of_digit = [np.flatnonzero(handwriting.labels == digit)[index::count] for digit in range(10)]
        clip_digits = np.empty(0) if recordings is None else recordings.digits
        self._clips_of_digit = [np.flatnonzero(clip_digits == digit) for digit in range(10)]

    def items(self, start: int, count: int, digits: Sequence[int] | None = None) -> Items:
        """Draw `count` items from index `start`; `digits` fixes their labels."""
        rows = [self._item(start + n, None if digits is None else int(digits[n])) for n in range(count)]
        return Items(*(np.stack(part) for part in zip(*rows, strict=True)))

    def _item(self, index: int, digit: int | None) -> tuple[NDArray[Any], ...]:
        random = np.random.default_rng([self.seed, index, _SOURCE[self.split]])
        drawn = int(random.integers(10))
        digit = drawn if digit is None else digit
        glyph = self._glyphs[random.choice(self.glyphs_of_digit[digit])]
        video, text = synthesize_video(glyph, random), synthesize_text(digit, random)
        audio = noisy_audio(self._clip(digit, random), self._snr_db, random)
        return audio, video, text, np.asarray(digit, dtype=np.int64)

    def _clip(self, digit: int, random: np.random.Generator) -> NDArray[np.float32]:
        if self.recordings is not None:
            return self.recordings.clips[int(random.choice(self._clips_of_digit[digit]))]
        return synthesize_word(digit, voice(int(random.integers(*VOICES[self.split]))), random)


def noisy_audio(
    clip: NDArray[np.float32], snr_db: tuple[float, float], random: np.random.Generator
) -> NDArray[np.int16]:
    """Place a clip within 0.8 s and add noise: int16 [6400]."""
    clip = clip[:SAMPLES]
    padding = SAMPLES - clip.size
    audio = np.zeros(SAMPLES, dtype=np.float64)
    first = int(random.integers(padding + 1))
    audio[first : first + clip.size] = clip
    noise = coloured_noise(SAMPLES, random)
    power = float(np.mean(np.square(clip, dtype=np.float64))) + 1e-9
    noise *= np.sqrt(power / 10 ** (random.uniform(*snr_db) / 10))
    audio += noise
    audio *= random.uniform(*_LOUDNESS) / max(float(np.abs(audio).max()), 1e-9)
    return audio.astype(np.int16)


def coloured_noise(size: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Noise of power 1 whose spectrum falls by 0 to 6 dB an octave."""
    spectrum = np.fft.rfft(random.standard_normal(size))
    hertz = np.fft.rfftfreq(size, 1 / RATE_HZ)
    spectrum /= np.maximum(hertz / 100.0, 1.0) ** random.uniform(0.0, 1.0)
    noise = np.fft.irfft(spectrum, n=size)
    return np.asarray(noise / np.sqrt(np.mean(noise**2)))


def synthesize_video(glyph: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.uint8]:
    """Frames of a moving glyph [28, 28]: uint8 [4, 24, 24]."""
    middle = (SIDE_PX - 1) / 2
    across = np.arange(SIDE_PX, dtype=np.float32) - np.float32(middle)
    angles = random.uniform(-0.25, 0.25) + random.normal(0, 0.08, (FRAMES, 1, 1))
    scale = 28 / SIDE_PX * random.uniform(0.95, 1.3)
    shift = random.normal(0, 1.5, (FRAMES, 2, 1, 1))
    x, y = across[None, None, :] + shift[:, 0], across[None, :, None] + shift[:, 1]
    source_x = scale * (np.cos(angles) * x + np.sin(angles) * y) + 13.5
    source_y = scale * (-np.sin(angles) * x + np.cos(angles) * y) + 13.5
    frames = sample(glyph, source_x, source_y)
    bar_angles, offsets = random.uniform(0, np.pi, (FRAMES, 1, 1)), random.uniform(-5, 5, (FRAMES, 1, 1))
    distance = np.cos(bar_angles) * across[None, None, :] + np.sin(bar_angles) * across[None, :, None] - offsets
    hidden = np.where(np.abs(distance) < BAR_PX / 2, random.uniform(0, 1), frames)
    grainy = 0.2 + 0.6 * hidden + random.uniform(*GRAIN) * random.standard_normal(hidden.shape)
    return (grainy.clip(0, 1) * 255).astype(np.uint8)


def synthesize_text(digit: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """A digit's name or a hint with typing errors: uint8 [6]."""
    hints = ("odd" if digit % 2 else "even", "high" if digit >= 5 else "low")
    word = hints[int(random.integers(2))] if random.random() < HINT_SHARE else NAMES[digit]
    letters = np.zeros(CHARACTERS, dtype=np.uint8)
    letters[: len(word)] = np.frombuffer(word.encode(), dtype=np.uint8)
    typos = (random.random(CHARACTERS) < TYPO_SHARE) & (letters > 0)
    return np.where(typos, random.integers(97, 123, CHARACTERS), letters).astype(np.uint8)
