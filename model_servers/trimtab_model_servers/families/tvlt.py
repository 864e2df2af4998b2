"""TVLT (Tang et al., NeurIPS 2022): one ViT-B trunk over patches of a spectrogram and of video frames.

Inputs are `audio` FP32 [B, T, 128], log-mel frames, T a multiple of 16 up to 2048, and `video` UINT8 [B, 8, 3, 224,
224]; outputs are `label` and `confidence`. Early fusion: an absent modality has no tokens. The original implementation
omits the class token for audio alone and does not support video alone; here every subset has it.
"""

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.interfaces import Parameters
from trimtab_model_servers.families.multimodal import Encoder, MultimodalModel, build_multimodal

KNOBS = frozenset({"modalities"})
MODALITIES = ("audio", "video")
PATCH, SIDE_PX, BANDS, LONGEST = 16, 224, 128, 2048
PLACES, PITCHES, MOMENTS = (SIDE_PX // PATCH) ** 2, BANDS // PATCH, LONGEST // PATCH


class TvltParameters(Parameters):
    """Settings of the family; the defaults are those of the paper."""

    labels: int = Field(default=2, ge=2, le=10_000, description="Number of classes; sentiment on MOSEI has two")
    frames: int = Field(default=8, ge=1, le=64, description="Frames of video")
    depth: int = Field(default=12, ge=1, le=48)
    width: int = Field(default=768, ge=32, le=4096, multiple_of=16)
    heads: int = Field(default=12, ge=1, le=64)


class Tvlt(MultimodalModel):
    """Embeddings of both modalities, the transformer, and a head on the class token."""

    modalities = MODALITIES

    def __init__(self, size: TvltParameters) -> None:
        super().__init__()
        width = size.width
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.audio_patch = nn.Conv2d(1, width, PATCH, PATCH)
        self.audio_kind = nn.Parameter(torch.zeros(1, 1, width))
        self.audio_moments = nn.Parameter(torch.zeros(1, MOMENTS, 1, width))
        self.audio_pitches = nn.Parameter(torch.zeros(1, 1, PITCHES, width))
        self.video_patch = nn.Conv2d(3, width, PATCH, PATCH)
        self.video_kind = nn.Parameter(torch.zeros(1, 1, width))
        self.video_frames = nn.Parameter(torch.zeros(1, size.frames, 1, width))
        self.video_places = nn.Parameter(torch.zeros(1, 1, PLACES, width))
        self.trunk = Encoder(size.depth, width, size.heads, 4 * width)
        self.head = nn.Sequential(
            nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(), nn.Linear(2 * width, size.labels)
        )

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the labels from one or both modalities: [B, labels]."""
        embed = {"audio": self.embed_audio, "video": self.embed_video}
        tokens = [embed[name](tensor) for name, tensor in inputs.items()]
        first = self.class_token.expand(tokens[0].shape[0], -1, -1)
        scores: Tensor = self.head(self.trunk(torch.cat([first, *tokens], dim=1))[:, 0])
        return scores

    def embed_audio(self, audio: Tensor) -> Tensor:
        """Map log-mel frames [B, T, 128] to tokens [B, T / 2, width]; frames after a multiple of 16 or 2048 are cut."""
        steps = min(audio.shape[1], LONGEST) // PATCH
        if not steps:
            raise ValueError(f"audio must have at least {PATCH} frames, not {audio.shape[1]}")
        patches = self.audio_patch(audio[:, None, : steps * PATCH]).permute(0, 2, 3, 1)
        positioned: Tensor = patches + self.audio_moments[:, :steps] + self.audio_pitches
        return positioned.flatten(1, 2) + self.audio_kind

    def embed_video(self, video: Tensor) -> Tensor:
        """Map frames [B, F, 3, 224, 224] to tokens [B, 196 · F, width]."""
        rows, frames = video.shape[:2]
        pixels = video.flatten(0, 1).to(torch.float32).sub_(127.5).mul_(1 / 127.5)
        patches = self.video_patch(pixels).flatten(2).transpose(1, 2).reshape(rows, frames, PLACES, -1)
        positioned: Tensor = patches + self.video_frames[:, :frames] + self.video_places
        return positioned.flatten(1, 2) + self.video_kind


build = partial(build_multimodal, Tvlt, TvltParameters)
