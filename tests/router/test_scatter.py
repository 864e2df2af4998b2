"""Scatter: each member of a batch gets its own rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_pipeline, a_stage
from tests.router.test_graph import digits
from trimtab_protocol import Tensor
from trimtab_router.transport.batch_codec import MalformedResponse, max_response_bytes, scatter

STAGE = digits().stage("locate")


def an_answer(found, crops=None):
    found = np.array(found, np.int64)
    total = int(found.sum())
    marks = np.repeat(np.arange(total, dtype=np.float32), 3).reshape(total, 3) if crops is None else crops
    return [Tensor.of("found", found), Tensor.of("crops", marks)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_scatter_gives_each_member_its_own_rows(members):
    found = [count for member in members for count in member]
    split = scatter(STAGE, an_answer(found), [len(member) for member in members])

    begin = 0
    for member, own in zip(members, split, strict=True):
        assert own["found"].tolist() == member
        assert own["crops"][:, 0].tolist() == list(range(begin, begin + sum(member)))
        begin += sum(member)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Tensor.of("found", np.array([1]))], "stage locate: the response has no output 'crops'; it has: found"),
        (an_answer([1, 1]), "output 'found' has 2 rows; it must have 1"),
        (an_answer([2], np.zeros((1, 3), np.float32)), "output 'crops' has 1 rows; it must have 2"),
        (
            an_answer([1], np.zeros((1, 4), np.float32)),
            r"output 'crops' has shape \[1, 4\]; its rows must have shape \[3\]",
        ),
        (an_answer([1], np.zeros((1, 3))), "output 'crops' is FP64; it must be FP32"),
        (
            [Tensor.of("found", np.array([-1])), Tensor.of("crops", np.zeros((0, 3), np.float32))],
            "output 'found' must hold one non-negative count for each of 1 rows",
        ),
    ],
)
def test_answers_that_are_not_what_the_stage_promises(answer, message):
    with pytest.raises(MalformedResponse, match=message):
        scatter(STAGE, answer, [1])


@pytest.mark.parametrize(
    ("outputs", "least", "most"),
    [
        ([{"name": "y", "datatype": "FP32", "shape": [4]}], 160, 160 + 2**16),
        ([{"name": "y", "datatype": "FP64", "shape": []}, {"name": "z", "datatype": "BOOL", "shape": [3]}], 110, 2**17),
        ([{"name": "y", "datatype": "FP32", "shape": [-1]}], 777, 777),
        ([{"name": "y", "datatype": "BYTES", "shape": [1]}], 777, 777),
    ],
)
def test_an_answer_is_at_most_as_large_as_the_stage_says(outputs, least, most):
    stage = a_pipeline([a_stage("s", outputs=outputs)], outputs=[{"name": "y", "from": "s.outputs.y"}]).spec.stages[0]

    assert least <= max_response_bytes(stage, 10, 777) <= most
