"""`VisionTower`: a small convolutional encoder that maps a page to sixteen tokens, four per cell.

It replaces the vision tower of transformers' model classes and has its call signature.
"""

from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from trimtab_model_servers.families.digits.layers import Convolution, Residual

_OUTPUTS: Any = import_module("transformers.modeling_outputs")  # a plain import takes mypy minutes

TOKENS_A_SIDE: Final = 4
PAGE_TOKENS: Final = TOKENS_A_SIDE * TOKENS_A_SIDE


class VisionTower(nn.Module):
    """Encoder of a page to `PAGE_TOKENS` tokens, row by row."""

    num_patches: Final = PAGE_TOKENS
    """Read by Mllama."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(1, 20, stride=2),
            Convolution(20, 32, stride=2),
            Residual(32),
            Convolution(32, 64, stride=2),
            Residual(64),
            Convolution(64, width, stride=3),
        )
        self.places = nn.Parameter(0.5 * torch.randn(PAGE_TOKENS, width))

    def features(self, pixels: Tensor) -> Tensor:
        """Map uint8 or float pages [N, 1, 96, 96] in 0…255 to features [N, 16, width], without position embeddings."""
        x = pixels.float()
        x = (x - x.mean(dim=(2, 3), keepdim=True)) / (x.std(dim=(2, 3), keepdim=True) + 8.0)
        maps: Tensor = self.stem(x.contiguous(memory_format=torch.channels_last))
        return maps.flatten(2).transpose(1, 2)

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:
        """Encode pages [..., 1, 96, 96] to tokens [..., 16, width]; other arguments of vision towers are ignored."""
        del options
        leading = pixel_values.shape[:-3]
        tokens = self.features(pixel_values.reshape(-1, *pixel_values.shape[-3:])) + self.places
        tokens = tokens.reshape(*leading, *tokens.shape[1:])
        return _OUTPUTS.BaseModelOutputWithPooling(last_hidden_state=tokens, hidden_states=(tokens,))
