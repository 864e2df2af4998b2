"""Transformer: merging and prompts in its layers, merge rules, ToMe's published counts, and timm's normalisation."""

import pytest
import timm.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from trimtab_model_servers.transformer.config import SHAPES, ViTConfig, preprocess
from trimtab_model_servers.transformer.merging import RULES, MergeInputs, clamp_r, in_each_layer
from trimtab_model_servers.transformer.transformer import ForwardPlan, Perceptron, VisionTransformer

PUBLISHED = {
    "ImageNet": (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD),
    "Half": (timm.data.IMAGENET_INCEPTION_MEAN, timm.data.IMAGENET_INCEPTION_STD),
    "CLIP": (timm.data.OPENAI_CLIP_MEAN, timm.data.OPENAI_CLIP_STD),
}
SMALL = ViTConfig(side=32, patch=4, channels=3, width=32, depth=4, heads=2, inner=64)


def a_transformer(shape=SMALL, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = VisionTransformer(shape).eval().requires_grad_(requires_grad=False)
    for parameter in made.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(dtype)


def images(count=3, seed=1, dtype=torch.float32, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen(transformer, course):
    """Tokens that each layer's attention and perceptron see."""
    counts = []
    for block in transformer.blocks:
        for part in (block.attn, block.mlp):
            part.register_forward_pre_hook(lambda _, given: counts.append(given[0].shape[1]))
    transformer(images(), course)
    return list(zip(counts[::2], counts[1::2], strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("merged", "prompts", "accumulate", "counted"),
    [
        (6, 0, False, [(65, 59), (59, 53), (53, 47), (47, 41)]),
        (20, 3, False, [(68, 48), (48, 28), (28, 16), (16, 10)]),
        (20, 3, True, [(68, 48), (51, 31), (34, 22), (25, 19)]),
        (0, 2, True, [(67, 67), (69, 69), (71, 71), (73, 73)]),
    ],
)
def test_rule_and_prompts_determine_tokens_of_each_layer(rule, merged, prompts, accumulate, counted):
    learned = torch.randn(3, 4, prompts, 32) if prompts else None

    plan = ForwardPlan((merged,) * 4, RULES[rule], prompts=learned, accumulate=accumulate)
    assert seen(a_transformer(), plan) == counted


@pytest.mark.parametrize("rule", RULES)
def test_merging_what_is_the_same_changes_nothing(rule):
    """Pairs of equal patches: half of them merge away without any loss, if attention counts the others twice."""
    transformer = a_transformer(dtype=torch.float64)
    transformer.pos_embed.data[:, 1:] = transformer.pos_embed[:, 1:2]
    random = torch.Generator().manual_seed(3)
    tiles = torch.randn(2, 3, 8, 4, 4, 4, generator=random).double()  # rows, then pairs of patches side by side
    whole = torch.stack([tiles, tiles], dim=4)  # [B, C, 8, 4 pairs, 2, 4, 4]
    pictures = whole.permute(0, 1, 2, 5, 3, 4, 6).reshape(2, 3, 32, 32)
    plain = transformer(pictures)
    merged, unweighted = (
        transformer(pictures, ForwardPlan((32, 0, 0, 0), RULES[rule], proportional=flag)) for flag in (True, False)
    )

    assert (merged - plain).abs().max() < 1e-12
    assert (unweighted - plain).abs().max() > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(rule):
    transformer = a_transformer(dtype=torch.float64)
    prompts = torch.randn(4, 4, 2, 32, dtype=torch.float64)
    pictures = images(4, dtype=torch.float64)
    together = transformer(pictures, ForwardPlan((9,) * 4, RULES[rule], prompts=prompts))
    for row in range(4):
        alone = ForwardPlan((9,) * 4, RULES[rule], prompts=prompts[row : row + 1])

        assert torch.allclose(transformer(pictures[row : row + 1], alone)[0], together[row], atol=1e-12)


def test_prompts_are_replaced_in_each_layer():
    transformer = a_transformer()
    prompts = torch.randn(3, 4, 2, 32)
    plain, given, joined = (
        transformer(images(), course)
        for course in (ForwardPlan(), ForwardPlan(prompts=prompts), ForwardPlan(prompts=prompts, accumulate=True))
    )
    last_only = prompts.clone()
    last_only[:, :3] = 0

    assert not torch.allclose(plain, given, atol=1e-3)
    assert not torch.allclose(given, joined, atol=1e-3)
    assert not torch.allclose(given, transformer(images(), ForwardPlan(prompts=last_only)), atol=1e-3)


def test_mean_pooling_weighs_patches_by_size():
    """With nothing but merging between embedding and pooling, the mean must stay."""
    shape = SMALL.replace(pooling="Mean", depth=1)
    transformer = a_transformer(shape, dtype=torch.float64)
    for part in (transformer.blocks[0].attn.proj, transformer.blocks[0].mlp.fc2):
        part.weight.zero_()
        part.bias.zero_()

    pictures = images(dtype=torch.float64)
    assert torch.allclose(transformer(pictures), transformer(pictures, ForwardPlan((20,))))


@pytest.mark.parametrize("name", PUBLISHED)
def test_fixed_values_are_those_that_timm_has(name):
    as_bytes = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, deviation = (torch.tensor(values)[:, None, None] for values in PUBLISHED[name])
    expected = (as_bytes.float() / 255 - mean) / deviation

    assert torch.allclose(preprocess(as_bytes, name), expected, atol=1e-6)
    assert torch.allclose(preprocess(as_bytes.float() / 255, name), expected, atol=1e-6)


def test_each_image_by_its_own_values_whatever_is_beside_it():
    images = torch.rand(2, 3, 8, 8) * torch.tensor([0.1, 1.0])[:, None, None, None]
    both = preprocess(images, "Image")

    assert torch.allclose(both[:1], preprocess(images[:1], "Image"))
    assert both.mean(dim=(1, 2, 3)).abs().max() < 1e-5
    assert torch.equal(preprocess(images, "None"), images)


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
    """Merge the tokens of one image by loops, as section 3 of ToMe describes it."""
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
