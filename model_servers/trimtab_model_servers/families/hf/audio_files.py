"""Audio files: WAV, FLAC and OGG decoded to mono samples at a model's rate, with bounded length."""

import io
from math import gcd
from typing import Final

import numpy as np
import soundfile
from scipy.signal import resample_poly

from trimtab_model_servers.errors import InvalidRow
from trimtab_protocol.tensors import Array

FORMATS: Final = ("WAV", "WAVEX", "FLAC", "OGG")
MIN_SECONDS: Final = 0.025
"""A window of speech features; models of raw audio need as much."""
MIN_RATE_HZ, MAX_RATE_HZ, MAX_CHANNELS = 1_000, 192_000, 8


def decode_audio(name: str, rows: Array, rate_hz: int, max_seconds: float) -> list[Array]:
    """Samples of each row in -1…1, FP32 [samples]; InvalidRow if one is no audio file, too short or too long."""
    return [_decode(f"input {name!r}: row {number}", row, rate_hz, max_seconds) for number, row in enumerate(rows)]


def _decode(where: str, content: bytes, rate_hz: int, max_seconds: float) -> Array:
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise InvalidRow(f"{where} is {file.format}; send {', '.join(FORMATS)}")
            if not MIN_RATE_HZ <= file.samplerate <= MAX_RATE_HZ or file.channels > MAX_CHANNELS:
                raise InvalidRow(
                    f"{where} has {file.samplerate} Hz and {file.channels} channels; send {MIN_RATE_HZ} to "
                    f"{MAX_RATE_HZ} Hz and at most {MAX_CHANNELS} channels"
                )
            bounds, rate = f"send {MIN_SECONDS:g} to {max_seconds:g} s", file.samplerate
            if file.frames > max_seconds * rate:
                raise InvalidRow(f"{where} has {file.frames / rate:g} s of audio; {bounds}")
            samples = file.read(int(max_seconds * rate) + 1, dtype="float32", always_2d=True).mean(axis=1)
    except soundfile.SoundFileError as error:
        raise InvalidRow(f"{where} is no audio file; send {', '.join(FORMATS)}") from error
    if not MIN_SECONDS * rate <= len(samples) <= max_seconds * rate:
        raise InvalidRow(f"{where} has {len(samples) / rate:g} s of audio; {bounds}")
    if not np.isfinite(samples).all():
        raise InvalidRow(f"{where} has samples that are not finite")
    return resample(samples, rate, rate_hz)


def resample(samples: Array, from_hz: int, to_hz: int) -> Array:
    """Samples at another rate, by a polyphase filter."""
    if from_hz == to_hz:
        return samples
    divisor = gcd(from_hz, to_hz)
    return np.asarray(resample_poly(samples, to_hz // divisor, from_hz // divisor), np.float32)
