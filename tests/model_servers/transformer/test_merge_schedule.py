"""Merge schedules: ToMe's published token counts and operations for ViT-B/16."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trimtab_model_servers.transformer.config import SHAPES
from trimtab_model_servers.transformer.merging import clamp_r, in_each_layer
from trimtab_model_servers.transformer.transformer import ForwardPlan, Perceptron, VisionTransformer

BASE = SHAPES["base"]
PATCH_EMBEDDING = 3 * 16**2 * BASE.width * BASE.patches
"""Multiplications before the layers, which the paper does not count."""
COUNTS = {
    0: [197] * 12,
    5: list(range(192, 136, -5)),
    8: list(range(189, 100, -8)),
    13: list(range(184, 40, -13)),
    16: [181, 165, 149, 133, 117, 101, 85, 69, 53, 37, 21, 11],
    25: [172, 147, 122, 97, 72, 47, 24, 13, 7, 4, 3, 2],
}
RATIOS = {5: 1.19, 8: 1.34, 13: 1.70, 16: 2.02, 25: 3.08}


def multiplications(plan: ForwardPlan, counts: list[int] | None = None) -> int:
    """Multiplications of the layers for one image; ``counts`` receives the tokens in each layer's perceptron."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer = VisionTransformer(BASE)
        for perceptron in (module for module in transformer.modules() if isinstance(module, Perceptron)):
            perceptron.register_forward_pre_hook(
                lambda _, inputs: None if counts is None else counts.append(inputs[0].shape[1])
            )
        transformer(torch.empty(1, 3, 224, 224), plan)
    return int(counter.get_total_flops()) // 2 - PATCH_EMBEDDING


@pytest.mark.parametrize("merged", COUNTS)
def test_token_counts_and_operations_are_the_published_ones(merged):
    counts: list[int] = []
    fewer, plain = multiplications(ForwardPlan((merged,) * 12), counts), multiplications(ForwardPlan())

    assert counts == COUNTS[merged]
    assert plain == pytest.approx(17.45e9, rel=1e-3)
    assert plain / fewer == pytest.approx(RATIOS.get(merged, 1.0), rel=0.01)


@pytest.mark.parametrize(("count", "replaced", "joined"), [(8, 1.04, 1.28), (4, 1.02, 1.14), (32, 1.17, 2.16)])
def test_accumulated_prompts_cost_more_than_replaced_ones(count, replaced, joined):
    prompts = torch.empty(1, 12, count, BASE.width, device="meta")
    costs = [multiplications(ForwardPlan(prompts=prompts, accumulate=accumulate)) for accumulate in (False, True)]

    assert [cost / multiplications(ForwardPlan()) for cost in costs] == pytest.approx([replaced, joined], rel=0.01)


def test_schedule_has_one_number_or_one_per_layer():
    assert in_each_layer([], 3) == (0, 0, 0)
    assert in_each_layer([4], 2) == (4, 4)
    with pytest.raises(ValueError, match="a schedule of 2 numbers; this transformer has 3 layers"):
        in_each_layer([1, 2], 3)


@given(st.integers(1, 300), st.integers(0, 400))
def test_layer_merges_at_most_half_of_the_patches(patches, merged):
    assert clamp_r(merged, patches) == min(merged, patches // 2)
