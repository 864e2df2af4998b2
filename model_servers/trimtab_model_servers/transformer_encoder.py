"""Pre-norm transformer encoder with dense attention and GELU, as in ViT and HuBERT."""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Layer(nn.Module):
    """Self-attention and a feed-forward block, each with a residual connection."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, tokens, width] to the same shape."""
        rows, tokens, width = x.shape
        split = self.project(self.before(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        output = scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.attended(output)
        feed_forward: Tensor = self.narrow(gelu(self.wide(self.between(x))))
        return x + feed_forward


class Encoder(nn.Module):
    """A stack of layers and a final normalization."""

    def __init__(self, depth: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, heads, inner) for _ in range(depth)))
        self.last = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, tokens, width] to the same shape."""
        output: Tensor = self.last(self.layers(x))
        return output
