"""Token ids between stages and as model inputs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.families.sequences import collapse_repeats, model_inputs, pack, resize_width

ROWS = st.integers(0, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(-1, 9), min_size=width, max_size=width), min_size=1, max_size=4)
)


def tensor(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)


def texts(tokens: torch.Tensor) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in tokens.tolist()]


@given(ROWS, st.integers(1, 7))
def test_pack_keeps_order(rows, most):
    tokens = pack(tensor(rows), most)

    assert texts(tokens) == [[token for token in row if token >= 0][:most] for row in rows]
    assert tokens.shape[1] == max(len(text) for text in texts(tokens))
    assert all(row[: len(text)] == text for row, text in zip(tokens.tolist(), texts(tokens), strict=True))


def test_model_inputs_have_special_tokens_and_a_mask():
    ids, mask = model_inputs(tensor([[-1, 5, 6, 99], [7, -1, -1, -1]]), max_tokens=4, vocabulary=90)

    assert ids.tolist() == [[101, 5, 6, 102], [101, 7, 102, 0]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert model_inputs(tensor([[99]]), max_tokens=4, vocabulary=90)[0].tolist() == [[101, 100, 102]]


def test_resize_width_gives_fixed_width():
    assert resize_width(tensor([[4, 5]]), 4).tolist() == [[4, 5, -1, -1]]
    assert resize_width(tensor([[4, 5, 6]]), 2).tolist() == [[4, 5]]
    assert resize_width(torch.empty(2, 0, dtype=torch.int64), 1).tolist() == [[-1], [-1]]


def test_collapse_repeats_joins_letters_between_blanks():
    assert texts(collapse_repeats(tensor([[0, 7, 7, 0, 7, 8, 0]]), 0)) == [[7, 7, 8]]
