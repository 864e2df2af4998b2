"""Images are normalised as the makers of weights do it, whether they come as bytes or as numbers."""

import pytest
import timm.data
import torch

from trimtab_model_servers.transformer.config import preprocess

PUBLISHED = {
    "ImageNet": (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD),
    "Half": (timm.data.IMAGENET_INCEPTION_MEAN, timm.data.IMAGENET_INCEPTION_STD),
    "CLIP": (timm.data.OPENAI_CLIP_MEAN, timm.data.OPENAI_CLIP_STD),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fixed_values_are_those_that_timm_has(name):
    as_bytes = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, deviation = (torch.tensor(values)[:, None, None] for values in PUBLISHED[name])
    expected = (as_bytes.float() / 255 - mean) / deviation

    assert torch.allclose(preprocess(as_bytes, name), expected, atol=1e-6)
    assert torch.allclose(preprocess(as_bytes.float() / 255, name), expected, atol=1e-6)


def test_each_image_by_its_own_values_whatever_is_beside_it():
    images = (
        torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        * torch.tensor([0.1, 1.0])[:, None, None, None]
    )
    both = preprocess(images, "Image")

    assert torch.allclose(both[:1], preprocess(images[:1], "Image"))
    assert both.mean(dim=(1, 2, 3)).abs().max() < 1e-5
    assert torch.equal(preprocess(images, "None"), images)
