"""Token ids between stages and as model inputs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.families.sequences import (
    frame,
    pack,
    pad_tokens,
    replace_unknown,
    resize_width,
    token_counts,
)

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


@given(ROWS)
def test_frame_joins_question_and_context(rows):
    tokens = tensor(rows)
    joined = frame([(100,), tokens, (101, 102), tokens, (103,)])

    assert texts(joined) == [[100, *text, 101, 102, *text, 103] for text in texts(tokens)]


def test_pad_tokens_returns_ids_and_mask():
    ids, mask = pad_tokens(tensor([[5, 6, -1], [7, -1, -1]]), padding=1)

    assert ids.tolist() == [[5, 6, 1], [7, 1, 1]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert token_counts(tensor([[5, 6, -1], [-1, -1, -1]])).tolist() == [2, 0]


def test_ids_outside_vocabulary_are_replaced():
    assert replace_unknown(tensor([[3, 10, 99, -1]]), vocabulary=10, unknown=3).tolist() == [[3, 3, 3, -1]]


def test_resize_width_gives_fixed_width():
    assert resize_width(tensor([[4, 5]]), 4).tolist() == [[4, 5, -1, -1]]
    assert resize_width(tensor([[4, 5, 6]]), 2).tolist() == [[4, 5]]
    assert resize_width(torch.empty(2, 0, dtype=torch.int64), 1).tolist() == [[-1], [-1]]
