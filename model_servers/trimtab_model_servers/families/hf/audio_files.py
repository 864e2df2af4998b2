"""Audio: WAV, FLAC and OGG files, or samples, as mono samples at a model's rate, with bounded length."""

import io
from collections.abc import Iterable
from itertools import chain, repeat
from math import gcd
from typing import Final

import numpy as np
import soundfile
import torch
from scipy.signal import resample_poly

from trimtab_model_servers.errors import InvalidRow
from trimtab_protocol.tensors import Array

FORMATS: Final = ("WAV", "WAVEX", "FLAC", "OGG")
MIN_SECONDS: Final = 0.025
"""A window of speech features; models of raw audio need as much."""
MIN_RATE_HZ, MAX_RATE_HZ, MAX_CHANNELS = 1_000, 192_000, 8


def decode_audio(
    name: str, rows: Array | torch.Tensor, rate_hz: int, max_seconds: float, rates_hz: Iterable[int] = ()
) -> list[Array]:
    """Samples of each row in -1…1, FP32 [samples]; InvalidRow if one is no audio file, too short or too long.

    Rows are files, or samples FP32 [rows, samples] at `rates_hz`; 0 or none is `rate_hz`.
    """
    sounds = []
    for number, (row, stated_hz) in enumerate(zip(rows, chain(rates_hz, repeat(0)), strict=False)):
        where, rate = f"input {name!r}: row {number}", stated_hz or rate_hz
        if isinstance(row, torch.Tensor):
            samples = row.cpu().numpy()
            _check(where, rate, len(samples), max_seconds)
        else:
            samples, rate = _decode(where, row, max_seconds)
        if not np.isfinite(samples).all():
            raise InvalidRow(f"{where} has samples that are not finite")
        sounds.append(resample(samples, rate, rate_hz))
    return sounds


def _decode(where: str, content: bytes, max_seconds: float) -> tuple[Array, int]:
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise InvalidRow(f"{where} is {file.format}; send {', '.join(FORMATS)}")
            _check(where, file.samplerate, file.frames, max_seconds, file.channels)
            samples = file.read(int(max_seconds * file.samplerate) + 1, dtype="float32", always_2d=True).mean(axis=1)
            _check(where, file.samplerate, len(samples), max_seconds)  # a file may state another length
            return samples, file.samplerate
    except soundfile.SoundFileError as error:
        raise InvalidRow(f"{where} is no audio file; send {', '.join(FORMATS)}") from error


def _check(where: str, rate_hz: int, samples: int, max_seconds: float, channels: int = 1) -> None:
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ or channels > MAX_CHANNELS:
        raise InvalidRow(
            f"{where} has {rate_hz} Hz and {channels} channels; send {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz and at most "
            f"{MAX_CHANNELS} channels"
        )
    if not MIN_SECONDS * rate_hz <= samples <= max_seconds * rate_hz:
        raise InvalidRow(f"{where} has {samples / rate_hz:g} s of audio; send {MIN_SECONDS:g} to {max_seconds:g} s")


def resample(samples: Array, from_hz: int, to_hz: int) -> Array:
    """Samples at another rate, by a polyphase filter."""
    if from_hz == to_hz:
        return samples
    divisor = gcd(from_hz, to_hz)
    return np.asarray(resample_poly(samples, to_hz // divisor, from_hz // divisor), np.float32)
