"""Token probabilities of a batch, and stop strings: text is released once no stop string can begin in it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.engine.sampling import token_probabilities
from trimtab_model_servers.engine.stop_strings import StopFilter

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
