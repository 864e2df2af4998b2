"""Steps of the engine: attention masks, token probabilities of a batch, and text released before stop strings."""

import math

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
from trimtab_model_servers.engine.sampling import token_probabilities
from trimtab_model_servers.engine.stop_strings import StopFilter

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


CHUNKS = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


def test_greedy_probability_ignores_banned_tokens():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 5.0, 4.0]])

    probabilities = token_probabilities(logits, [(1, 1)])

    assert probabilities.greedy_tokens == [1, 2]
    expected = logits.log_softmax(dim=-1)
    assert probabilities.greedy_log_probabilities == pytest.approx([float(expected[0, 1]), float(expected[1, 2])])
    assert probabilities.logits[1].tolist() == [2.0, -math.inf, 4.0]
    assert logits[1, 1] == 5.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_non_finite_row_does_not_affect_others(wrong):
    probabilities = token_probabilities(torch.tensor([[0.0, wrong, 1.0], [2.0, 5.0, 4.0]]), [])

    assert not math.isfinite(probabilities.greedy_log_probabilities[0])
    assert (probabilities.greedy_tokens[1], math.isfinite(probabilities.greedy_log_probabilities[1])) == (1, True)


def test_greedy_token_is_chosen_by_exact_logits():
    near = torch.tensor([[1.0, 1.0000001, 40.0]])

    assert token_probabilities(near, [(0, 2)]).greedy_tokens == [1]


@given(CHUNKS, STOPS)
def test_released_text_ends_before_first_complete_stop_string(texts, stops):
    stop_filter, released, stopped = StopFilter(stops), "", False
    whole = ""
    for text in texts:
        whole += text
        chunk = stop_filter.add(text)
        released += chunk.text
        stopped = chunk.stopped
        if stopped:
            break
        withheld = len(whole) - len(released)
        assert not any(stop in whole for stop in stops)
        assert all(not stop.startswith(whole[at:]) for stop in stops for at in range(len(whole) - withheld))
    if stopped:
        assert released == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    else:
        assert released + stop_filter.flush() == whole
