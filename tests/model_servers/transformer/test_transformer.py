"""Effect of merging and prompts in the transformer's layers, and normalisation of images as by timm."""

import pytest
import timm.data
import torch

from trimtab_model_servers.transformer.config import ViTConfig, preprocess
from trimtab_model_servers.transformer.merging import RULES
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer

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
    shape = SMALL.model_copy(update={"pooling": "Mean", "depth": 1})
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
