from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.training.digits import variants_of
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits.family import VARIANTS, build_network, load, prepare_for_serving, save
from trimtab_model_servers.families.digits.layers import Convolution
from trimtab_model_servers.families.digits.locator import MAX_OBJECTS, Locator, LocatorConfig, cut_crops, decode
from trimtab_model_servers.weights.loading import fuse_batch_norms
from trimtab_training.digits.page_generator import PageSource

WEIGHTS = Path(__file__).parents[3] / "pipelines" / "digits" / "weights"
LOCATORS, READERS = variants_of("locate"), variants_of("read")


@pytest.fixture(scope="module")
def pages() -> torch.Tensor:
    held_out = PageSource("held-out", seed=21)
    return torch.from_numpy(np.stack([page.pixels for page in held_out.pages(0, 64)]))


def crops_of(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=torch.manual_seed(1))


@pytest.mark.parametrize("variant", LOCATORS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_locator_outputs_have_types_shapes_and_bounds(variant, batch, pages):
    locator = load(WEIGHTS / f"{variant}.safetensors")

    with torch.inference_mode():
        answer = locator.infer({"image": pages[:batch]})

    rows = int(answer["count"].sum())
    assert {name: tensor.dtype for name, tensor in answer.items()} == {
        "count": torch.int64,
        "boxes": torch.float32,
        "crops": torch.uint8,
        "confidence": torch.float32,
    }
    assert answer["count"].shape == answer["confidence"].shape == (batch,)
    assert bool(((answer["confidence"] >= 0.5) & (answer["confidence"] <= 1)).all())
    assert answer["boxes"].shape == (rows, 4)
    assert answer["crops"].shape == (rows, 1, 28, 28)
    assert int(answer["count"].min()) >= 0
    assert int(answer["count"].max()) <= MAX_OBJECTS
    assert bool((answer["boxes"] >= 0).all())
    assert bool((answer["boxes"] <= 96).all())


@pytest.mark.parametrize("variant", LOCATORS)
def test_locator_rows_are_independent(variant, pages):
    locator = load(WEIGHTS / f"{variant}.safetensors")

    with torch.inference_mode():
        together = locator.infer({"image": pages[:9]})
        alone = [locator.infer({"image": page[None]}) for page in pages[:9]]

    assert torch.equal(together["count"], torch.cat([answer["count"] for answer in alone]))
    torch.testing.assert_close(together["boxes"], torch.cat([answer["boxes"] for answer in alone]), atol=0.02, rtol=0)
    confidence = torch.cat([answer["confidence"] for answer in alone])
    torch.testing.assert_close(together["confidence"], confidence, atol=0.02, rtol=0)
    crops = torch.cat([answer["crops"] for answer in alone]).int()
    assert int((together["crops"].int() - crops).abs().max()) <= 2


@pytest.mark.parametrize("variant", READERS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_reader_outputs_are_typed_and_rows_independent(variant, batch):
    reader = load(WEIGHTS / f"{variant}.safetensors")

    with torch.inference_mode():
        together = reader.infer({"crop": crops_of(batch)})
        alone = [reader.infer({"crop": crop[None]}) for crop in crops_of(batch)]

    assert together["digit"].dtype == torch.int64
    assert together["digit"].shape == (batch,)
    assert together["confidence"].dtype == torch.float32
    assert bool(((together["confidence"] >= 0.1) & (together["confidence"] <= 1)).all())
    assert torch.equal(together["digit"], torch.cat([answer["digit"] for answer in alone]))
    torch.testing.assert_close(
        together["confidence"], torch.cat([answer["confidence"] for answer in alone]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("variant", READERS)
def test_reader_accepts_an_empty_batch(variant):
    """Pages without detections lead to an empty batch of crops."""
    reader = load(WEIGHTS / f"{variant}.safetensors")

    with torch.inference_mode():
        answer = reader.infer({"crop": crops_of(0)})

    assert answer["digit"].shape == answer["confidence"].shape == (0,)


def test_locator_without_detections_returns_empty_rows(pages):
    locator = prepare_for_serving(build_network("locate-xs", seed=1))
    assert isinstance(locator, Locator)
    locator.threshold.fill_(1.1)

    with torch.inference_mode():
        answer = locator.infer({"image": pages[:3]})

    assert answer["count"].tolist() == [0, 0, 0]
    assert answer["boxes"].shape == (0, 4)
    assert answer["crops"].shape == (0, 1, 28, 28)


def test_decode_finds_peaks_and_geometry():
    maps = torch.full((1, 4, 24, 24), -9.0)
    maps[:, 1:] = 0
    maps[0, 0, 5, 10], maps[0, 0, 5, 11] = 4.0, 3.0  # one peak: the lower neighbour is suppressed
    maps[0, 0, 18, 3] = 2.0
    maps[0, 1, 5, 10], maps[0, 2, 5, 10] = 0.5, -0.25
    maps[0, 3, 18, 3] = float(np.log(20 / 27))

    boxes, scores = decode(maps)

    assert boxes.shape == (1, MAX_OBJECTS, 4)
    assert scores[0, :2].tolist() == pytest.approx([0.982, 0.881], abs=1e-3)
    assert float(scores[0, 2]) < 0.01
    assert boxes[0, 0].tolist() == pytest.approx([44 - 13.5, 21 - 13.5, 44 + 13.5, 21 + 13.5], abs=1e-4)
    assert boxes[0, 1].tolist() == pytest.approx([4, 64, 24, 84], abs=1e-4)


def test_crop_of_28_pixels_equals_the_page(pages):
    box = torch.tensor([[10.0, 20.0, 38.0, 48.0], [60.0, 3.0, 88.0, 31.0]])

    crops = cut_crops(pages[:5], torch.tensor([1, 4]), box)

    assert torch.equal(crops[0, 0], pages[1, 0, 20:48, 10:38])
    assert torch.equal(crops[1, 0], pages[4, 0, 3:31, 60:88])


def test_crop_beyond_the_page_repeats_the_border(pages):
    crops = cut_crops(pages[:1], torch.tensor([0]), torch.tensor([[82.0, -14.0, 110.0, 14.0]]))

    assert torch.equal(crops[0, 0, 14:, :14], pages[0, 0, :14, 82:])
    assert torch.equal(crops[0, 0, 0, :14], pages[0, 0, 0, 82:])
    assert torch.equal(crops[0, 0, 14:, -1], pages[0, 0, :14, -1])


def test_folding_keeps_outputs():
    torch.manual_seed(3)
    layer = Convolution(3, 5)
    for _ in range(4):
        layer(torch.randn(8, 3, 10, 10) * 3 + 1)
    layer.eval()
    x = torch.randn(2, 3, 10, 10)
    before = layer(x)

    fuse_batch_norms(layer)
    fuse_batch_norms(layer)

    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in layer.modules())
    torch.testing.assert_close(layer(x), before, atol=1e-5, rtol=1e-5)


def test_build_is_deterministic_and_keeps_global_random_state():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = build_network("read-xs", seed=4).state_dict(), build_network("read-xs", seed=4).state_dict()

    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("variant", ["locate-xs", "read-xs"])
def test_saved_weights_load_within_half_precision(variant, tmp_path):
    network = prepare_for_serving(build_network(variant, seed=9))
    path = tmp_path / "weights.safetensors"

    save(network, VARIANTS[variant], path)
    again = load(path)

    assert type(again) is type(network)
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, network.state_dict()[name], atol=1e-3, rtol=1e-3)


def of_another_family(path):
    save_file({"weight": torch.zeros(1)}, path, metadata={"family": "resnet"})


def of_another_size(path):
    save(prepare_for_serving(build_network("read-xs", seed=1)), VARIANTS["read-s"], path)


@pytest.mark.parametrize(
    ("write", "message"), [(of_another_family, "family 'resnet'"), (of_another_size, "size mismatch")]
)
def test_unusable_weights_are_rejected(tmp_path, write, message):
    path = tmp_path / "unusable.safetensors"
    write(path)

    with pytest.raises(ModelError, match=message):
        load(path)


def test_unknown_variant_is_rejected():
    with pytest.raises(ModelError, match=r"unknown variant 'read-xxl'"):
        build_network("read-xxl")


def test_locator_side_must_be_a_multiple_of_16():
    with pytest.raises(ValueError, match="multiple of 16"):
        LocatorConfig(side=100, widths=(8, 8), blocks=(0, 0), neck=8)


def test_each_stage_has_four_variants_or_more_by_size():
    for family in ("locate", "read"):
        names = variants_of(family)
        sizes = [sum(p.numel() for p in build_network(name, seed=0).parameters()) for name in names]

        assert len(names) >= 4
        assert sizes == sorted(sizes)
        assert len({type(VARIANTS[name]) for name in names}) == 1
