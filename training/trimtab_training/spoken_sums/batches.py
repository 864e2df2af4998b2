"""Batches of spoken sums for the training of transcribers: features, words, and the word of each frame."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from trimtab_training.digits_av.formant_synthesis import RATE_HZ
from trimtab_training.spoken_sums.dataset import SumSource
from trimtab_training.spoken_sums.models import FIRST_WORD, FRAME_SAMPLES, SUBSAMPLING, feature_extractor

IGNORED: Final = -100
Row = tuple[Tensor, Tensor, Tensor]
"""Features [T, 40], tokens, and the token of each frame."""
Batch = tuple[Tensor, Tensor, list[Tensor], Tensor]
"""Features [B, T, 40] of sums, their mask [B, T], tokens of each, and the token of each frame [B, T / 8]."""
_WINDOW: Final = 8
"""Batches of similar length are drawn from as many batches of the sums in order of length."""


class Features:
    """Features of spoken sums in order of length, with their words as tokens."""

    def __init__(self, source: SumSource, count: int) -> None:
        extractor, rows = feature_extractor(), []
        for index in range(count):
            spoken = source.spoken(index)
            extracted = extractor([spoken.audio], sampling_rate=RATE_HZ, return_tensors="pt")
            features, tokens = extracted["input_features"][0], torch.tensor(spoken.words) + FIRST_WORD
            rows.append((features.bfloat16(), tokens, align(torch.from_numpy(spoken.edges), tokens, len(features))))
        self._rows: list[Row] = sorted(rows, key=lambda row: len(row[0]))

    def draw(self, size: int, random: torch.Generator, stride: int = 1) -> Batch:
        """Rows of similar length, of which each `stride`-th spectrum remains."""
        window = min(_WINDOW * size, len(self._rows))
        start = int(torch.randint(len(self._rows) - window + 1, (1,), generator=random))
        return _batch(
            [self._rows[start + int(index)] for index in torch.randperm(window, generator=random)[:size]], stride
        )

    def batches(self, size: int, stride: int = 1) -> Iterator[Batch]:
        return (_batch(self._rows[start : start + size], stride) for start in range(0, len(self._rows), size))


def align(edges: Tensor, tokens: Tensor, features: int) -> Tensor:
    """Token of each of a model's frames: a word's in the last three quarters of the word, else blank."""
    samples = FRAME_SAMPLES * torch.arange(-(-features // SUBSAMPLING))
    first, end = edges[:, :1], edges[:, 1:]
    within = (samples >= first + (end - first) // 4) & (samples < end)
    return (within * tokens[:, None]).amax(dim=0)


def _batch(rows: Sequence[Row], stride: int) -> Batch:
    features, tokens, aligned = map(list, zip(*rows, strict=True))
    features = [row[::stride] for row in features]
    lengths = torch.tensor([len(row) - 1 for row in features])  # the extractor masks the last frame
    padded = nn.utils.rnn.pad_sequence(features, batch_first=True).float()
    mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
    targets = nn.utils.rnn.pad_sequence(aligned, batch_first=True, padding_value=IGNORED)
    return padded * mask[..., None], mask, tokens, targets
