"""Attention masks: an advanced mask equals one computed anew."""

import numpy as np
import pytest
import torch

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import PositionArray, step_mask
from trimtab_model_servers.engine.kv_cache import HeadLayout, KvCache

LIKE = torch.zeros(0)
STORE = KvCache([0], HeadLayout(kv_heads=2, head_size=4, group_size=1), slots=9, length=200, like=LIKE)
SIDE_BY_SIDE, WITH_A_GAP, FAR_APART = [2, 3, 4], [2, 4, 5], [0, 4, 8]


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

    assert (
        StepContext((STORE, mask), positions, STORE.row_indices(torch.from_numpy(slots), positions)).advance() is None
    )


def test_keys_are_written_to_their_slot_position_and_head():
    store = KvCache([3], HeadLayout(kv_heads=2, head_size=4, group_size=1), slots=3, length=5, like=LIKE)
    keys, values = torch.arange(16.0).view(2, 2, 4), -torch.arange(16.0).view(2, 2, 4)

    store.write(3, store.row_indices(torch.tensor([2, 0]), torch.tensor([4, 1])), keys, values)

    cached = store.layer(3)
    assert torch.equal(cached[0][2, :, 4], keys[0])
    assert torch.equal(cached[0][0, :, 1], keys[1])
    assert torch.equal(cached[1][[2, 0], :, [4, 1]], values)
    assert int((cached[0] != 0).sum()) == 15  # nothing else was touched
