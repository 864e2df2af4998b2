"""Formant synthesis of spoken digits and signs: voice harmonics and shaped noise through three resonances (Klatt 1980).

A word is a sequence of phones. A phone is a target of formants, voicing and noise; values glide between targets. Voices
differ in pitch, vocal tract length, vowels and speaking rate. Vowel targets follow Peterson and Barney 1952.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Split = Literal["train", "held-out"]

RATE_HZ: Final = 8000
HOP: Final = 40
"""Samples of one interpolation step, 5 ms."""

VOICES: Final = {"train": (0, 400), "held-out": (10_000, 10_060)}
"""Range of voice numbers of each split."""

_BANDWIDTHS_HZ: Final = np.array([80.0, 110.0, 160.0])


@dataclass(frozen=True, slots=True)
class _Phone:
    """Formants in Hz, loudness of voice and noise, centre of the noise, and duration."""

    formants: tuple[float, float, float]
    voice: float
    noise: float
    noise_hz: float
    seconds: float


_PHONES: Final = {
    "iy": _Phone((300, 2290, 3010), 1.0, 0.0, 0, 0.14),
    "ih": _Phone((390, 1990, 2550), 1.0, 0.0, 0, 0.09),
    "eh": _Phone((530, 1840, 2480), 1.0, 0.0, 0, 0.11),
    "ey": _Phone((480, 2000, 2600), 1.0, 0.0, 0, 0.12),
    "ah": _Phone((640, 1190, 2390), 1.0, 0.0, 0, 0.11),
    "ax": _Phone((500, 1400, 2400), 0.8, 0.0, 0, 0.06),
    "aa": _Phone((730, 1090, 2440), 1.0, 0.0, 0, 0.11),
    "ao": _Phone((570, 840, 2410), 1.0, 0.0, 0, 0.15),
    "ow": _Phone((470, 900, 2350), 1.0, 0.0, 0, 0.14),
    "uw": _Phone((320, 900, 2240), 1.0, 0.0, 0, 0.17),
    "r": _Phone((420, 1200, 1600), 0.8, 0.0, 0, 0.08),
    "w": _Phone((300, 650, 2200), 0.7, 0.0, 0, 0.08),
    "n": _Phone((280, 1600, 2500), 0.35, 0.0, 0, 0.10),
    "v": _Phone((280, 1150, 2300), 0.35, 0.06, 2800, 0.07),
    "z": _Phone((280, 1700, 2500), 0.25, 0.35, 3600, 0.09),
    "s": _Phone((350, 1700, 2500), 0.0, 0.55, 3600, 0.13),
    "f": _Phone((340, 1100, 2300), 0.0, 0.16, 2500, 0.11),
    "th": _Phone((340, 1300, 2400), 0.0, 0.14, 3000, 0.10),
    "t": _Phone((350, 1700, 2600), 0.0, 0.5, 3400, 0.035),
    "k": _Phone((350, 1900, 2400), 0.0, 0.45, 1900, 0.04),
    "hush": _Phone((400, 1500, 2500), 0.0, 0.0, 0, 0.05),
}
_SIGN_PHONES: Final = {
    "p": _Phone((350, 900, 2300), 0.0, 0.35, 1200, 0.03),
    "l": _Phone((360, 1100, 2600), 0.7, 0.0, 0, 0.07),
    "m": _Phone((270, 1000, 2200), 0.35, 0.0, 0, 0.09),
}
"""Phones that no digit has; a voice's accent on them has random numbers of its own."""
_WORDS: Final = (
    ("z", "ih", "r", "ow"),
    ("w", "ah", "n"),
    ("t", "uw"),
    ("th", "r", "iy"),
    ("f", "ao", "r"),
    ("f", "aa", "ih", "v"),
    ("s", "ih", "hush", "k", "s"),
    ("s", "eh", "v", "ax", "n"),
    ("ey", "ih", "hush", "t"),
    ("n", "aa", "ih", "n"),
    ("p", "l", "ah", "s"),
    ("m", "aa", "ih", "n", "ax", "s"),
    ("t", "aa", "ih", "m", "z"),
)
"""Zero to nine, plus, minus, times."""


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A speaker."""

    pitch_hz: float
    """Pitch in the middle of a word."""
    tract: float
    """Factor on every formant; a shorter vocal tract has higher ones."""
    accent: dict[str, NDArray[np.float64]]
    """Factor on each formant of each phone, by its name."""
    tempo: float
    """Factor on every duration."""
    breath: float
    """Noise under the voice, 0…1."""


def voice(number: int) -> Voice:
    random = np.random.default_rng([77, number])
    accents = ((random, _PHONES), (np.random.default_rng([78, number]), _SIGN_PHONES))
    accent = {name: np.exp(draws.normal(0, [0.08, 0.05, 0.04])) for draws, phones in accents for name in phones}
    return Voice(
        pitch_hz=float(np.exp(random.uniform(np.log(85), np.log(230)))),
        tract=float(random.uniform(0.88, 1.18)),
        accent=accent,
        tempo=float(random.uniform(0.75, 1.25)),
        breath=float(random.uniform(0.0, 0.15)),
    )


def synthesize_word(word: int, speaker: Voice, random: np.random.Generator) -> Floats:
    """Synthesise one utterance of a digit, or of a sign: 10 plus, 11 minus, 12 times; `random` varies tempo and pitch.

    Returns: 0.15 to 0.9 s at 8 kHz, peak 1.
    """
    names = ("hush", *_WORDS[word], "hush")
    phones = [(_PHONES | _SIGN_PHONES)[name] for name in names]
    lengths = np.array([p.seconds for p in phones]) * speaker.tempo * np.exp(random.normal(0, 0.12, len(phones)))
    lengths[[0, -1]] = 0.02
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    middles = (edges[1:] + edges[:-1]) / 2
    moments = np.arange(0, edges[-1], HOP / RATE_HZ)
    phone_of_step = np.searchsorted(edges, moments, side="right") - 1
    formants = np.stack([np.array(p.formants) * speaker.accent[n] for p, n in zip(phones, names, strict=True)])
    formants *= speaker.tract * np.exp(random.normal(0, 0.02, 3))
    glides = np.stack([np.interp(moments, middles, formants[:, n]) for n in range(3)], axis=1)
    loud = _smooth(np.array([p.voice for p in phones])[phone_of_step])
    hiss = _smooth(np.array([p.noise for p in phones])[phone_of_step])
    hiss_hz = np.array([p.noise_hz or 2500.0 for p in phones])[phone_of_step]
    contour = 1.0 + 0.15 * random.uniform(-1, 1) - 0.2 * moments / edges[-1]
    wave = _voiced(glides, loud, speaker.pitch_hz * contour * np.exp(random.normal(0, 0.05)))
    wave += _noise(glides, hiss + speaker.breath * loud * 0.3, hiss_hz, random)
    return (wave / max(float(np.abs(wave).max()), 1e-6)).astype(np.float32)


def _smooth(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.convolve(levels, np.ones(3) / 3, mode="same")


def _response(hertz: NDArray[np.float64], formants: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gain of three two-pole resonances in series: hertz [T, K], formants [T, 3] to [T, K]."""
    square = hertz[:, :, None] ** 2
    centre = formants[:, None, :]
    gains = centre**2 / np.sqrt((square - centre**2) ** 2 + (_BANDWIDTHS_HZ * hertz[:, :, None]) ** 2 + 1.0)
    return np.asarray(gains.prod(axis=2))


def _voiced(
    formants: NDArray[np.float64], loud: NDArray[np.float64], pitch_hz: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Sum the harmonics below 3.8 kHz; each falls off by 6 dB an octave before the resonances shape it."""
    count = int(3800 / pitch_hz.max())
    order = np.arange(1, count + 1)
    levels = _response(pitch_hz[:, None] * order, formants) / order * loud[:, None]
    steps = np.arange(len(loud) * HOP) / HOP
    rotation = np.exp(2j * np.pi * np.cumsum(np.interp(steps, np.arange(len(loud)), pitch_hz)) / RATE_HZ)
    total, wave = np.zeros(steps.size), np.ones(steps.size, dtype=np.complex128)
    for n in range(count):
        wave = wave * rotation
        total += np.interp(steps, np.arange(len(loud)), levels[:, n]) * wave.imag
    return total


def _noise(
    formants: NDArray[np.float64],
    level: NDArray[np.float64],
    centre_hz: NDArray[np.float64],
    random: np.random.Generator,
) -> NDArray[np.float64]:
    """Noise in short overlapping frames, each with its own spectrum."""
    size, frames = 2 * HOP, len(level)
    window = np.hanning(size + 1)[:-1]
    hertz = np.fft.rfftfreq(size, 1 / RATE_HZ)
    bump = np.exp(-(((hertz - centre_hz[:, None]) / 900.0) ** 2)) + 0.05 * _response(
        np.broadcast_to(hertz, (frames, hertz.size)), formants
    ).clip(max=4.0)
    spectra = np.fft.rfft(random.standard_normal((frames, size)) * window, axis=1) * bump
    shaped = np.fft.irfft(spectra, n=size, axis=1) * (level * 2.0)[:, None]
    total = np.zeros((frames + 1) * HOP)
    total[: frames * HOP] += shaped[:, :HOP].ravel()
    total[HOP:] += shaped[:, HOP:].ravel()
    return total[: frames * HOP]
