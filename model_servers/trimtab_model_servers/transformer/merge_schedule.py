"""Merge schedules: tokens of each layer, and multiply-accumulates.

A schedule lists the tokens merged in each layer, between attention and perceptron (ToMe, Bolya et al. 2023, section 3).
No layer merges more than half of its patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """Tokens of one layer, including class token and prompts, in its attention and in its perceptron."""

    attention: int
    perceptron: int


def in_each_layer(schedule: Sequence[int], depth: int) -> tuple[int, ...]:
    """Expand a schedule to every layer; one number applies to all, an empty schedule merges nothing.

    Raises:
        ValueError: neither one number nor one for each layer.
    """
    if len(schedule) in {0, 1}:
        return tuple(schedule or (0,)) * depth
    if len(schedule) != depth:
        raise ValueError(
            f"a schedule of {len(schedule)} numbers; this transformer has {depth} layers: give 1 or {depth}"
        )
    return tuple(schedule)


def clamp_r(merged: int, mergeable: int) -> int:
    """Limit the merged tokens of a layer to half of the mergeable ones."""
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
        patches: of the image.
        depth: layers.
        schedule: merged tokens per layer, or one number for all.
        leading: tokens before the patches, such as the class token.
        prompts: per layer.
        accumulate: whether prompts accumulate over layers.
    """
    counts = []
    for layer, merged in enumerate(in_each_layer(schedule, depth)):
        fixed = leading + prompts * (layer + 1 if accumulate else 1)
        attention = fixed + patches
        patches -= clamp_r(merged, patches)
        counts.append(LayerTokens(attention, fixed + patches))
    return counts


def multiplications(tokens: Sequence[LayerTokens], width: int, inner: int) -> int:
    """Multiply-accumulates of the layers for one image: 4·N·d² + 2·N²·d of attention, 2·N'·d·m of the perceptron.

    Args:
        tokens: of every layer.
        width: token dimension d.
        inner: MLP dimension m.
    """
    return sum(
        4 * layer.attention * width**2 + 2 * layer.attention**2 * width + 2 * layer.perceptron * width * inner
        for layer in tokens
    )
