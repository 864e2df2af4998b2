"""What is likeliest, of all rows at once."""

import math

import pytest
import torch

from trimtab_model_servers.engine.sampling import chances_of


def test_the_likeliest_of_each_row_with_its_probability_before_anything_is_barred():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 5.0, 4.0]])

    chances = chances_of(logits, [(1, 1)])

    assert chances.likeliest == [1, 2]
    expected = logits.log_softmax(dim=-1)
    assert chances.log_likeliest == pytest.approx([float(expected[0, 1]), float(expected[1, 2])])
    assert chances.logits[1].tolist() == [2.0, -math.inf, 4.0]
    assert logits[1, 1] == 5.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_is_no_numbers_is_no_other_rows_matter(wrong):
    chances = chances_of(torch.tensor([[0.0, wrong, 1.0], [2.0, 5.0, 4.0]]), [])

    assert not math.isfinite(chances.log_likeliest[0])
    assert (chances.likeliest[1], math.isfinite(chances.log_likeliest[1])) == (1, True)


def test_equals_go_to_the_first_though_their_probabilities_round_to_the_same():
    near = torch.tensor([[1.0, 1.0000001, 40.0]])

    assert chances_of(near, [(0, 2)]).likeliest == [1]
