import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_training.digits.datasets import PHOTOS, load_datasets, photo_columns
from trimtab_training.digits.page_generator import CENTRE_TOLERANCE, Page, PageSource, match_boxes, score_page


@pytest.fixture(scope="module")
def source() -> PageSource:
    return PageSource("held-out", seed=5)


def a_page(centres, side=30.0, labels=None) -> Page:
    boxes = np.array([(x - side / 2, y - side / 2, x + side / 2, y + side / 2) for x, y in centres], np.float32)
    digits = np.arange(len(centres)) if labels is None else np.array(labels)
    return Page(np.zeros((1, 96, 96), np.uint8), boxes.reshape(-1, 4), digits.astype(np.int64))


def test_pages_are_deterministic(source):
    again = PageSource("held-out", seed=5)

    for index in (0, 7, 100_000):
        first, second = source.page(index), again.page(index)
        assert np.array_equal(first.pixels, second.pixels)
        assert np.array_equal(first.boxes, second.boxes)
        assert np.array_equal(first.labels, second.labels)


def test_pages_differ_by_index_seed_and_split(source):
    first = source.page(0).pixels

    assert not np.array_equal(first, source.page(1).pixels)
    assert not np.array_equal(first, PageSource("held-out", seed=6).page(0).pixels)
    assert not np.array_equal(first, PageSource("train", seed=5).page(0).pixels)


def test_pages_have_shapes_and_bounds(source):
    counts = set()
    for page in source.pages(0, 200):
        sides = page.boxes[:, 2:] - page.boxes[:, :2]
        counts.add(len(page.labels))

        assert page.pixels.shape == (1, 96, 96)
        assert page.pixels.dtype == np.uint8
        assert page.boxes.dtype == np.float32
        assert page.boxes.shape == (len(page.labels), 4)
        assert page.boxes.min() >= 0
        assert page.boxes.max() <= 96
        assert np.allclose(sides[:, 0], sides[:, 1], atol=1e-3)
        assert sides.min() >= 19.9
        assert sides.max() <= 34.1
        assert page.labels.dtype == np.int64
        assert set(page.labels.tolist()) <= set(range(10))
    assert counts == {1, 2, 3}


def test_all_digits_are_drawn(source):
    labels = np.concatenate([page.labels for page in source.pages(0, 200)])

    assert set(labels.tolist()) == set(range(10))


def test_drawing_a_page_takes_about_a_millisecond(source):
    """The load tester draws pages while it sends them; the bound leaves room for a busy machine."""
    started = time.thread_time()
    source.pages(1000, 200)

    assert (time.thread_time() - started) / 200 < 0.004


def test_no_source_digit_is_in_both_splits():
    train, held_out = load_datasets("train"), load_datasets("held-out")

    assert not set(train.origins.tolist()) & set(held_out.origins.tolist())
    assert len(train.origins) + len(held_out.origins) == 1797 + 5000
    train_glyphs = {glyph.tobytes() for glyph in train.glyphs}
    twins = sum(glyph.tobytes() in train_glyphs for glyph in held_out.glyphs)
    assert twins == 0


def test_no_photo_region_is_in_both_splits():
    train, held_out = load_datasets("train"), load_datasets("held-out")

    for width in (303, 384, 512, 1000):
        columns = set(range(width))
        left, right = (set(range(width)[photo_columns(split, width)]) for split in ("train", "held-out"))
        assert left | right == columns
        assert not left & right
    assert len(train.photos) == len(held_out.photos) == len(PHOTOS)
    assert all(min(photo.shape) >= 96 for photo in (*train.photos, *held_out.photos))


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="unknown split 'test': should be 'train' or 'held-out'"):
        PageSource("test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page index -1 is negative"):
        PageSource("held-out").page(-1)
    with pytest.raises(ValueError, match="2 boxes but 1 labels"):
        score_page(a_page([(40, 40)]), np.zeros((2, 4), np.float32), np.zeros(1, np.int64))


def test_ground_truth_scores_full_accuracy(source):
    for page in source.pages(0, 50):
        assert score_page(page, page.boxes, page.labels) == (len(page.labels),) * 3


@pytest.mark.parametrize(
    ("shift_px", "matched"), [(0.0, 1), (30 * CENTRE_TOLERANCE - 0.1, 1), (30 * CENTRE_TOLERANCE + 0.1, 0)]
)
def test_box_matches_within_the_tolerance(shift_px, matched):
    page, moved = a_page([(40, 40)], labels=[3]), a_page([(40 + shift_px, 40)])

    assert score_page(page, moved.boxes, np.array([3])) == (matched, matched, 1)
    assert score_page(page, moved.boxes, np.array([4])) == (0, matched, 1)


def test_missed_and_invented_digits_cost_the_same():
    page = a_page([(20, 20), (70, 70)], labels=[1, 2])
    three = a_page([(20, 20), (70, 70), (20, 70)], labels=[1, 2, 3])

    assert score_page(page, page.boxes[:1], page.labels[:1]) == (1, 1, 2)
    assert score_page(page, three.boxes, three.labels) == (2, 2, 3)
    assert score_page(page, np.zeros((0, 4), np.float32), np.zeros(0, np.int64)) == (0, 0, 2)


def test_digit_matches_only_the_nearest_box():
    page = a_page([(40, 40)], labels=[8])
    boxes = a_page([(44, 40), (41, 40)]).boxes

    assert match_boxes(page, boxes).tolist() == [-1, 0]
    assert score_page(page, boxes, np.array([1, 8])) == (1, 1, 2)


@given(
    st.lists(st.tuples(st.floats(15, 81), st.floats(15, 81)), min_size=1, max_size=3),
    st.lists(st.tuples(st.floats(15, 81), st.floats(15, 81), st.integers(0, 9)), max_size=4),
)
def test_scores_of_any_answer_are_ordered(truth, answers):
    page = a_page(truth)
    boxes = a_page([(x, y) for x, y, _ in answers]).boxes
    labels = np.array([label for *_, label in answers], dtype=np.int64)

    correct, matched, total = score_page(page, boxes, labels)
    digit_of_box = match_boxes(page, boxes)

    assert 0 <= correct <= matched <= min(len(truth), len(answers))
    assert total == max(len(truth), len(answers))
    assert len(set(digit_of_box[digit_of_box >= 0].tolist())) == matched
