"""How many tokens each layer of a vision transformer sees, and what that costs. Pure; no torch.

A schedule says how many tokens are merged away in each layer, between its attention and its perceptron (ToMe, Bolya et
al. 2023, section 3). No layer merges more than half of the tokens that may be merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """Tokens in one layer, the class token and prompts included.

    Attributes:
        attention: what its attention sees.
        perceptron: what its perceptron sees.
    """

    attention: int
    perceptron: int


def in_each_layer(schedule: Sequence[int], depth: int) -> tuple[int, ...]:
    """Write a schedule out for every layer; one number counts for all, none means no merging.

    Raises:
        ValueError: when it is neither one number nor one for each layer.
    """
    if len(schedule) in {0, 1}:
        return tuple(schedule or (0,)) * depth
    if len(schedule) != depth:
        raise ValueError(
            f"a schedule of {len(schedule)} numbers; this transformer has {depth} layers: give 1 or {depth}"
        )
    return tuple(schedule)


def clamp_r(merged: int, mergeable: int) -> int:
    """Return how many of so many tokens one layer may merge: never more than half."""
    return max(0, min(merged, mergeable // 2))


def layer_tokens(
    patches: int,
    depth: int,
    schedule: Sequence[int] = (),
    *,
    leading: int = 1,
    prompts: int = 0,
    accumulate: bool = False,
) -> list[LayerTokens]:
    """Count the tokens of every layer.

    Args:
        patches: tokens of the image.
        depth: layers.
        schedule: tokens merged away, layer by layer or one number for all.
        leading: tokens before the patches that are never merged, such as the class token.
        prompts: learned tokens a layer.
        accumulate: whether each layer's prompts join those before, or take their place.
    """
    counted = []
    for layer, merged in enumerate(in_each_layer(schedule, depth)):
        kept = leading + prompts * (layer + 1 if accumulate else 1)
        attention = kept + patches
        patches -= clamp_r(merged, patches)
        counted.append(LayerTokens(attention, kept + patches))
    return counted


def multiplications(tokens: Sequence[LayerTokens], width: int, inner: int) -> int:
    """Multiply-accumulates of the layers for one image: 4·N·d² + 2·N²·d of attention, 2·N'·d·m of the perceptron.

    Args:
        tokens: of every layer.
        width: numbers a token has, d.
        inner: width of the perceptron, m.
    """
    return sum(
        4 * layer.attention * width**2 + 2 * layer.attention**2 * width + 2 * layer.perceptron * width * inner
        for layer in tokens
    )
