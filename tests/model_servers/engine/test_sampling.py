"""Token probabilities of a batch."""

import math

import pytest
import torch

from trimtab_model_servers.engine.sampling import token_probabilities


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
