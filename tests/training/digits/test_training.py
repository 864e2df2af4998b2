import numpy as np
import pytest
import torch

from trimtab_model_servers.families.digits.family import VARIANTS, build_network, prepare_for_serving
from trimtab_model_servers.families.digits.locator import Locator, cut_crops, decode
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_training.digits.calibration import locate_all
from trimtab_training.digits.page_generator import PageSource, match_boxes
from trimtab_training.digits.train import (
    SCHEDULES,
    calibrate,
    draw_crops,
    fit_locator,
    fit_reader,
    gather,
    locator_target,
)
from trimtab_training.trainer import Schedule


@pytest.fixture(scope="module")
def source() -> PageSource:
    return PageSource("train", seed=31)


@pytest.fixture(scope="module")
def pool(source):
    return gather(source.pages(0, 200))


def test_pool_keeps_every_digit(source, pool):
    pages = source.pages(0, 200)

    assert pool.images.shape == (200, 1, 96, 96)
    for index, page in enumerate(pages):
        present = pool.labels[index] >= 0
        assert pool.labels[index][present].tolist() == page.labels.tolist()
        assert np.array_equal(pool.boxes[index][present].numpy(), page.boxes)


def test_decoded_target_equals_ground_truth(source, pool):
    """`decode` inverts the target maps."""
    target = locator_target(pool.boxes, cells=48)
    heat = target.heat.clamp(1e-6, 1 - 1e-6)
    boxes, scores = decode(torch.cat([heat.logit()[:, None], target.geometry], dim=1))

    for page, page_boxes, page_scores in zip(source.pages(0, 200), boxes, scores, strict=True):
        digit_of_box = match_boxes(page, page_boxes[page_scores > 0.5].numpy())
        assert sorted(digit_of_box.tolist()) == list(range(len(page.labels)))


def test_drawn_crops_are_labelled_and_deterministic(pool):
    random = torch.Generator().manual_seed(1)

    crops, labels = draw_crops(pool, 64, random)

    assert crops.shape == (64, 1, 28, 28)
    assert crops.dtype == torch.uint8
    assert set(labels.tolist()) <= set(range(10))
    again, _ = draw_crops(pool, 64, torch.Generator().manual_seed(1))
    assert torch.equal(crops, again)


def test_training_lowers_the_loss_and_calibration_helps(source, pool):
    locator = build_network("locate-xs", seed=1)
    assert isinstance(locator, Locator)
    losses: list[float] = []

    fit_locator(locator, pool, Schedule(steps=80, batch=16, peak_rate=5e-3, seed=1), losses.append)
    threshold = calibrate(prepare_for_serving(locator), source, 300, 100)

    assert len(losses) == 80
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    pages = source.pages(300, 100)
    best = locate_all(locator, pages)
    assert float(locator.threshold) == pytest.approx(threshold)
    locator.threshold.fill_(0.9)
    strict = locate_all(locator, pages)
    assert best.pages.accuracy >= strict.pages.accuracy


def test_reader_training_lowers_the_loss(pool):
    reader = build_network("read-xs", seed=1)
    assert isinstance(reader, Reader)
    losses: list[float] = []

    fit_reader(reader, pool, Schedule(steps=60, batch=64, peak_rate=5e-3, seed=1), losses.append)

    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_every_variant_has_its_own_schedule_and_seed():
    assert list(SCHEDULES) == list(VARIANTS)
    assert len({schedule.seed for schedule in SCHEDULES.values()}) == len(VARIANTS)


def test_crops_come_from_the_given_page(pool):
    box = pool.boxes[:2, 0]

    assert torch.equal(
        cut_crops(pool.images, torch.tensor([0, 1]), box)[1], cut_crops(pool.images[1:2], torch.tensor([0]), box[1:])[0]
    )
