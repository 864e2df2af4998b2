"""Merge rules and schedules: invariants, the effect of each rule, and ToMe's published counts for ViT-B/16."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from trimtab_model_servers.transformer.config import SHAPES
from trimtab_model_servers.transformer.merging import RULES, MergeInputs, clamp_r, in_each_layer
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


def drawn(rows, count, width=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    tokens, keys = (torch.randn(rows, count, width, generator=random, dtype=torch.float64) for _ in range(2))
    sizes = torch.randint(1, 5, (rows, count), generator=random).double()
    return tokens, sizes, MergeInputs(keys, torch.rand(rows, count, generator=random, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 3), count=st.integers(2, 30), share=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_merging_keeps_sizes_and_weighted_sums(rule, rows, count, share, seed):
    tokens, sizes, evidence = drawn(rows, count, seed=seed)
    merged = max(1, int(share * (count // 2)))
    fewer, larger = RULES[rule].merge(tokens, sizes, evidence, merged)

    assert fewer.shape == (rows, count - merged, 8)
    assert torch.allclose(larger.sum(1), sizes.sum(1))
    assert torch.allclose((fewer * larger[..., None]).sum(1), (tokens * sizes[..., None]).sum(1))


def slow_bipartite(tokens, sizes, keys, merged):
    """One image by loops, as section 3 of ToMe tells it."""
    count = len(tokens)
    unit = normalize(keys, dim=-1)
    seekers, sought = range(1, count, 2), range(0, count, 2)
    best = {i: max(sought, key=lambda j: float(unit[i] @ unit[j])) for i in seekers}
    going = sorted(seekers, key=lambda i: -float(unit[i] @ unit[best[i]]))[:merged]
    group = {j: [j, *(i for i in going if best[i] == j)] for j in sought}
    order = [[i] for i in seekers if i not in going] + [group[j] for j in sought]
    mass = [sum(sizes[i] for i in members) for members in order]
    merged_tokens = [sum(sizes[i] * tokens[i] for i in members) / m for members, m in zip(order, mass, strict=True)]
    return torch.stack(merged_tokens), torch.stack(mass)


@pytest.mark.parametrize(("count", "merged"), [(8, 3), (9, 4), (21, 10), (21, 1)])
def test_bipartite_matching_is_what_the_paper_says(count, merged):
    tokens, sizes, evidence = drawn(3, count, seed=count)
    fewer, larger = RULES["bipartite"].merge(tokens, sizes, evidence, merged)
    for row in range(3):
        expected, mass = slow_bipartite(tokens[row], sizes[row], evidence.keys[row], merged)

        assert torch.allclose(fewer[row], expected)
        assert torch.allclose(larger[row], mass)


def test_by_energy_what_stands_alone_stays_and_the_crowd_merges():
    lonely = torch.eye(12, dtype=torch.float64)[:4]
    crowd = torch.eye(12, dtype=torch.float64)[11:].expand(8, -1)
    tokens = torch.cat([lonely, crowd])[None]
    fewer, larger = RULES["energy"].merge(tokens, torch.ones(1, 12).double(), MergeInputs(tokens, None, 0.5), 4)

    assert torch.equal(fewer[0, :4], lonely)
    assert larger[0].tolist()[:4] == [1, 1, 1, 1]
    assert larger[0, 4:].sum() == 8


def test_guided_rule_keeps_the_more_attended_patch():
    tokens = torch.eye(3, dtype=torch.float64).repeat_interleave(2, dim=0)[None]
    paid = torch.tensor([[0.5, 0.01, 0.02, 0.3, 0.2, 0.2]], dtype=torch.float64)
    marked = torch.arange(6, dtype=torch.float64)[None, :, None] + tokens
    _, larger = RULES["guided"].merge(marked, torch.ones(1, 6).double(), MergeInputs(tokens, paid, 0.9), 2)
    whole, _ = RULES["guided"].merge(marked, torch.ones(1, 6).double(), MergeInputs(tokens, paid, 0.9), 3)

    assert larger.sum() == 6
    assert sorted(larger[0].tolist()) == [1, 1, 2, 2]
    assert torch.allclose(whole[0, :, 0], torch.tensor([1.5, 2.5, 4.5]).double())
    with pytest.raises(ValueError, match="needs the class token's attention"):
        RULES["guided"].merge(tokens, torch.ones(1, 6).double(), MergeInputs(tokens, None, 0.9), 3)


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
