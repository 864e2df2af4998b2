"""Tokens per layer: ToMe's published schedules for ViT-B/16, and their operations."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.transformer.config import SHAPES
from trimtab_model_servers.transformer.merge_schedule import in_each_layer, layer_tokens, multiplications

BASE = SHAPES["base"]


def after_each_layer(merged):
    return [layer.perceptron for layer in layer_tokens(BASE.patches, BASE.depth, [merged])]


@pytest.mark.parametrize(
    ("merged", "counts"),
    [
        (0, [197] * 12),
        (5, list(range(192, 136, -5))),
        (8, list(range(189, 100, -8))),
        (10, list(range(187, 76, -10))),
        (13, list(range(184, 40, -13))),
        (15, list(range(182, 16, -15))),
        (16, [181, 165, 149, 133, 117, 101, 85, 69, 53, 37, 21, 11]),
        (20, [177, 157, 137, 117, 97, 77, 57, 37, 19, 10, 6, 4]),
        (25, [172, 147, 122, 97, 72, 47, 24, 13, 7, 4, 3, 2]),
    ],
)
def test_base_transformer_has_the_published_token_counts(merged, counts):
    assert after_each_layer(merged) == counts


@pytest.mark.parametrize(
    ("merged", "ratio"), [(5, 1.19), (8, 1.34), (10, 1.47), (13, 1.70), (15, 1.90), (16, 2.02), (20, 2.49), (25, 3.08)]
)
def test_multiplications_fall_as_published(merged, ratio):
    plain, fewer = (
        multiplications(layer_tokens(BASE.patches, BASE.depth, [r]), BASE.width, BASE.inner) for r in (0, merged)
    )

    assert plain == pytest.approx(17.45e9, rel=1e-3)
    assert plain / fewer == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize(("count", "replaced", "joined"), [(8, 1.04, 1.28), (4, 1.02, 1.14), (32, 1.17, 2.16)])
def test_prompts_that_join_cost_more_than_those_that_replace(count, replaced, joined):
    plain, *with_prompts = (
        multiplications(
            layer_tokens(BASE.patches, BASE.depth, prompts=prompts, accumulate=accumulate), BASE.width, BASE.inner
        )
        for prompts, accumulate in ((0, False), (count, False), (count, True))
    )

    assert [cost / plain for cost in with_prompts] == pytest.approx([replaced, joined], rel=0.01)


def test_a_schedule_is_one_number_or_one_a_layer():
    assert in_each_layer([], 3) == (0, 0, 0)
    with pytest.raises(ValueError, match="a schedule of 2 numbers; this transformer has 3 layers"):
        in_each_layer([1, 2], 3)


@given(st.integers(1, 300), st.lists(st.integers(0, 400), min_size=6, max_size=6), st.integers(0, 4))
def test_no_layer_merges_more_than_half_nor_touches_what_leads(patches, schedule, prompts):
    layers = layer_tokens(patches, 6, schedule, prompts=prompts)
    left = [patches, *(layer.perceptron - 1 - prompts for layer in layers)]

    assert all(2 * after >= before for before, after in pairwise(left))
    assert left[-1] >= 1
