"""Log-mel features: 24 bands of each 20 ms of audio, standardised per clip."""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from trimtab_model_servers.mel_filterbank import mel_filters

BANDS: Final = 24
STEPS: Final = 40
_HOP, _WINDOW = 160, 256
_LOWEST_HZ, _RATE_HZ = 80.0, 8000


def mel_steps(audio: Tensor) -> Tensor:
    """Map int16 samples [B, 6400] to float32 [B, 40, 24], mean 0 and deviation 1 over each clip."""
    samples = torch.nn.functional.pad(audio.to(torch.float32), (_WINDOW - _HOP, 0)) / 32768.0
    power: Tensor = torch.fft.rfft(samples.unfold(1, _WINDOW, _HOP) * _window()).abs().square()
    bands: Tensor = (power @ _triangles()).clamp(min=1e-8).log()
    centred = bands - bands.mean(dim=(1, 2), keepdim=True)
    deviation: Tensor = centred.square().mean(dim=(1, 2), keepdim=True).sqrt()
    return centred / (deviation + 1e-3)


@cache
def _window() -> Tensor:
    return torch.hann_window(_WINDOW, periodic=True)


@cache
def _triangles() -> Tensor:
    return mel_filters(BANDS, _WINDOW, _RATE_HZ, _LOWEST_HZ)
