"""Texts, images and sounds as rows of BYTES."""

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from trimtab_pipelines.synthetic_inputs import WORDS

RATE_HZ = 16_000
TOKENS = (*WORDS, "|", "–", "→", "1.3", "429", "naïve", "`code`", "(a)", "first_token_seconds", "/v1/models")
Rows = list[bytes]


def samples(files: Sequence[bytes]) -> list[Any]:
    """Samples of mono audio files, as transformers' pipelines take them."""
    return [soundfile.read(io.BytesIO(file), dtype="float32")[0] for file in files]


def some_texts(count: int, seed: int = 0) -> Rows:
    """Texts of 1 to about 60 tokens."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(TOKENS, k=draw.randint(1, 16)))[:200].encode() for _ in range(count)]


def some_images(count: int, seed: int = 0) -> Rows:
    """JPEG and PNG files of several sizes."""
    draw = np.random.default_rng(seed)
    files = []
    for number in range(count):
        width, height = draw.integers(24, 96, 2)
        file = io.BytesIO()
        pixels = draw.integers(256, size=(height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((int(width), int(height))).save(file, ("PNG", "JPEG")[number % 2])
        files.append(file.getvalue())
    return files


def some_sounds(count: int, seed: int = 0) -> Rows:
    """WAV files of chirps, 0.05 to 0.6 s."""
    draw = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        seconds = np.arange(int(draw.uniform(0.05, 0.6) * RATE_HZ)) / RATE_HZ
        samples = 0.3 * np.sin(2 * np.pi * (draw.uniform(80, 400) + draw.uniform(-300, 900) * seconds) * seconds)
        file = io.BytesIO()
        soundfile.write(file, samples + draw.normal(0, 0.02, len(samples)), RATE_HZ, format="WAV")
        files.append(file.getvalue())
    return files
