"""Log-mel features of Speech2Text: 80 bands every 10 ms, as Kaldi computes them.

Samples are FP32 at 16 kHz in -1…1. Each row's bands are normalized over its frames, as in the training of the
pretrained models.
"""

from functools import cache

import torch
from torch import Tensor

SAMPLES_PER_SECOND = 16_000
WINDOW, HOP, TRANSFORM = 400, 160, 512  # 25 ms, 10 ms, the next power of two
BANDS = 80
LOWEST_HZ = 20.0
PRE_EMPHASIS = 0.97
SCALE = 2.0**15  # Kaldi reads 16-bit integers
FLOOR = 1.192092955078125e-07


def mel_filters(count: int, transform: int, samples_per_second: int, lowest_hz: float) -> Tensor:
    """Filters of equal width in mel from ``lowest_hz`` to the Nyquist frequency, [transform / 2 + 1, count]."""
    lowest, highest = _mel(torch.tensor(lowest_hz)), _mel(torch.tensor(samples_per_second / 2))
    edges = torch.linspace(float(lowest), float(highest), count + 2, dtype=torch.float64)
    bins = _mel(torch.arange(transform // 2 + 1, dtype=torch.float64) * samples_per_second / transform)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0).to(torch.float32)


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz.to(torch.float64) / 700.0)


def frame_counts(samples: Tensor) -> Tensor:
    """Number of whole windows in ``samples``, at least one."""
    return (1 + (samples - WINDOW) // HOP).clamp(min=1)


def mel_bands(audio: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Map audio [B, T], T ≥ 400 and zero after each row's ``samples`` [B], to bands [B, frames, 80] and their mask."""
    counts = frame_counts(samples)
    frames = (audio * SCALE).unfold(1, WINDOW, HOP)[:, : int(counts.max())]
    frames = frames - frames.mean(dim=2, keepdim=True)
    before = torch.cat((frames[..., :1], frames[..., :-1]), dim=2)
    shaped = (frames - PRE_EMPHASIS * before) * _window()
    power = torch.fft.rfft(shaped, n=TRANSFORM).abs().square()
    bands = (power @ _filters()).clamp(min=FLOOR).log()
    mask = torch.arange(bands.shape[1]) < counts[:, None]
    return _normalized(bands, mask), mask.to(torch.int64)


def _normalized(bands: Tensor, mask: Tensor) -> Tensor:
    inside, count = mask[..., None], mask.sum(dim=1)[:, None, None]
    mean = (bands * inside).sum(dim=1, keepdim=True) / count
    centred = (bands - mean) * inside
    variance = centred.square().sum(dim=1, keepdim=True) / count
    return centred / variance.sqrt().clamp(min=1e-10)


@cache
def _window() -> Tensor:
    """Povey window: a Hann window with less steep ends."""
    return torch.hann_window(WINDOW, periodic=False, dtype=torch.float64).pow(0.85).to(torch.float32)


@cache
def _filters() -> Tensor:
    return mel_filters(BANDS, TRANSFORM, SAMPLES_PER_SECOND, LOWEST_HZ)
