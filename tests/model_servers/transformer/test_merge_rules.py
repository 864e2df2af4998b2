"""Merge rules: their common invariants, and the effect of each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from trimtab_model_servers.transformer.merging import RULES, MergeInputs


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


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_merged_alike_whatever_stands_beside_it(rule):
    tokens, sizes, evidence = drawn(4, 20)
    together, larger = RULES[rule].merge(tokens, sizes, evidence, 7)
    for row in range(4):
        alone = MergeInputs(evidence.keys[row : row + 1], evidence.importance[row : row + 1], evidence.progress)
        single, size = RULES[rule].merge(tokens[row : row + 1], sizes[row : row + 1], alone, 7)

        assert torch.allclose(single[0], together[row])
        assert torch.allclose(size[0], larger[row])


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
