"""Triangular mel filters."""

import torch
from torch import Tensor


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
