"""Attention masks: an advanced mask equals one computed anew; that of images equals that of Mllama's processor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model_servers.engine.models import IMAGE_ID, mllama_processing
from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import PositionArray, step_mask
from trimtab_model_servers.engine.image_attention import image_attention_mask
from trimtab_model_servers.engine.kv_cache import HeadLayout, KvCache
from trimtab_model_servers.engine.request import Image

LIKE = torch.zeros(0)
STORE = KvCache([0], HeadLayout(kv_heads=2, head_size=4, group_size=1), slots=9, length=200, like=LIKE)
SIDE_BY_SIDE, WITH_A_GAP, FAR_APART = [2, 3, 4], [2, 4, 5], [0, 4, 8]
PROMPTS = st.lists(st.sampled_from([IMAGE_ID, 7, 8]), min_size=1, max_size=14)


def step(slots: list[int], places: PositionArray) -> StepContext:
    """One token each at ``places`` [slots], which attends to its slot up to itself."""
    mask = step_mask(np.array(slots), (np.zeros_like(places), places + 1), len(slots), [], group=1, like=LIKE)
    positions = torch.from_numpy(places.copy())
    return StepContext((STORE, mask), positions, STORE.row_indices(torch.tensor(slots), positions))


@pytest.mark.parametrize("slots", [SIDE_BY_SIDE, WITH_A_GAP, FAR_APART])
def test_advanced_context_equals_new_one(slots):
    places = np.array([5, 17, 11])
    advanced: StepContext | None = step(slots, places)
    moves = 0
    while advanced is not None and (advanced := advanced.advance()) is not None:
        moves += 1
        anew = step(slots, places + moves)
        one, other = advanced.self_attention[1].decode, anew.self_attention[1].decode
        assert one is not None
        assert other is not None
        assert torch.equal(one.mask, other.mask)
        assert (one.length, one.has_gaps) == (other.length, other.has_gaps)
        assert torch.equal(advanced.positions, anew.positions)
        assert torch.equal(advanced.cache_rows, anew.cache_rows)

    assert moves == 64 - 18  # the padding of the mask


def test_context_with_prefill_chunk_does_not_advance():
    slots, places = np.array([1, 3, 3]), np.array([4, 0, 1])
    mask = step_mask(slots, (np.zeros_like(places), places + 1), 1, [(1, 3)], group=1, like=LIKE)
    positions = torch.from_numpy(places)

    rows = STORE.row_indices(torch.from_numpy(slots), positions)
    assert StepContext((STORE, mask), positions, rows).advance() is None


def test_keys_are_written_to_their_slot_position_and_head():
    store = KvCache([3], HeadLayout(kv_heads=2, head_size=4, group_size=1), slots=3, length=5, like=LIKE)
    keys, values = torch.arange(16.0).view(2, 2, 4), -torch.arange(16.0).view(2, 2, 4)

    store.write(3, store.row_indices(torch.tensor([2, 0]), torch.tensor([4, 1])), keys, values)

    cached = store.layer(3)
    assert torch.equal(cached[0][2, :, 4], keys[0])
    assert torch.equal(cached[0][0, :, 1], keys[1])
    assert torch.equal(cached[1][[2, 0], :, [4, 1]], values)
    assert int((cached[0] != 0).sum()) == 15  # nothing else was touched


@given(PROMPTS)
def test_image_mask_equals_the_processors(prompt):
    places = [place for place, token in enumerate(prompt) if token == IMAGE_ID]
    images = [Image(f"{place}", place, 1, tokens=1, padding=1) for place in places]
    mask = image_attention_mask(len(prompt), images)
    seen = np.zeros((len(prompt), len(places)), dtype=bool)
    if places:
        sparse = mllama_processing.get_cross_attention_token_mask(prompt, IMAGE_ID)
        dense = mllama_processing.convert_sparse_cross_attention_mask_to_dense(
            [sparse], [[1] * len(places)], 1, len(prompt)
        )
        seen = dense[0, :, :, 0].astype(bool)

    for place in range(len(prompt)):
        low, high, behind = (column[0] for column in mask.at(place, 1))
        assert behind == seen[place].any()
        wanted = np.flatnonzero(seen[place]).tolist() if behind else list(range(max(2 * len(places), 1)))
        assert list(range(low, high)) == wanted
    assert [column[0] for column in mask.at(99, 1)] == [
        column[-1] for column in (mask.low, mask.high, mask.after_image)
    ]
