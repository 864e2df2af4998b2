"""What follows from the step before is what would be worked out anew."""

import numpy as np
import pytest
import torch

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import Places, step_mask
from trimtab_model_servers.engine.kv_cache import HeadLayout, KvCache

LIKE = torch.zeros(0)
STORE = KvCache([0], HeadLayout(keys=2, size=4, group=1), slots=9, length=200, like=LIKE)
SIDE_BY_SIDE, WITH_A_GAP, FAR_APART = [2, 3, 4], [2, 4, 5], [0, 4, 8]


def step(slots: list[int], places: Places) -> StepContext:
    """One token each at ``places`` [slots], which sees all of its slot up to itself."""
    sight = step_mask(np.array(slots), (np.zeros_like(places), places + 1), len(slots), [], group=1, like=LIKE)
    positions = torch.from_numpy(places.copy())
    return StepContext((STORE, sight), positions, STORE.rows(torch.tensor(slots), positions))


@pytest.mark.parametrize("slots", [SIDE_BY_SIDE, WITH_A_GAP, FAR_APART])
def test_the_next_step_of_the_same_writers_is_as_if_worked_out_anew(slots):
    places = np.array([5, 17, 11])
    going_on: StepContext | None = step(slots, places)
    moves = 0
    while going_on is not None and (going_on := going_on.moved_on()) is not None:
        moves += 1
        anew = step(slots, places + moves)
        one, other = going_on.own[1].single, anew.own[1].single
        assert one is not None
        assert other is not None
        assert torch.equal(one.mask, other.mask)
        assert (one.longest, one.spread) == (other.longest, other.spread)
        assert torch.equal(going_on.positions, anew.positions)
        assert torch.equal(going_on.rows, anew.rows)

    assert moves == 64 - 18  # the mask's room


def test_a_step_with_a_chunk_has_no_next_one():
    slots, places = np.array([1, 3, 3]), np.array([4, 0, 1])
    sight = step_mask(slots, (np.zeros_like(places), places + 1), 1, [(1, 3)], group=1, like=LIKE)
    positions = torch.from_numpy(places)

    assert StepContext((STORE, sight), positions, STORE.rows(torch.from_numpy(slots), positions)).moved_on() is None


def test_keys_lie_where_their_slot_position_and_head_say():
    store = KvCache([3], HeadLayout(keys=2, size=4, group=1), slots=3, length=5, like=LIKE)
    keys, values = torch.arange(16.0).view(2, 2, 4), -torch.arange(16.0).view(2, 2, 4)

    store.write(3, store.rows(torch.tensor([2, 0]), torch.tensor([4, 1])), keys, values)

    kept = store.pair(3)
    assert torch.equal(kept[0][2, :, 4], keys[0])
    assert torch.equal(kept[0][0, :, 1], keys[1])
    assert torch.equal(kept[1][[2, 0], :, [4, 1]], values)
    assert int((kept[0] != 0).sum()) == 15  # nothing else was touched
