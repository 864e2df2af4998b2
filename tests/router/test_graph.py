"""Graph cursor: fan-out, join, skipped stages; and scatter, which gives each member of a batch its own rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_protocol import Tensor
from trimtab_router.execution.graph import Graph, GraphCursor
from trimtab_router.transport.batch_codec import MalformedResponse, max_response_bytes, scatter

PAGE = {"name": "page", "datatype": "FP32", "shape": [2]}
NOTE = {"name": "note", "datatype": "FP32", "shape": [1], "optional": True}


def locate(**changes):
    return {
        "name": "locate",
        "inputs": [{"name": "page", "from": "request.inputs.page"}],
        "outputs": [
            {"name": "found", "datatype": "INT64", "shape": []},
            {"name": "crops", "datatype": "FP32", "shape": [3], "countedBy": "found"},
        ],
        "variants": [a_variant()],
    } | changes


def read():
    return {
        "name": "read",
        "inputs": [{"name": "crop", "from": "locate.outputs.crops"}],
        "outputs": [{"name": "label", "datatype": "INT64", "shape": []}],
        "variants": [a_variant()],
    }


def digits(**changes):
    return a_pipeline(
        [locate(), read()],
        **{
            "inputs": [PAGE],
            "outputs": [
                {"name": "found", "from": "locate.outputs.found"},
                {"name": "labels", "from": "read.outputs.label"},
            ],
        }
        | changes,
    ).spec


def a_walk(spec, wanted=None, **inputs):
    graph = Graph(spec)
    return GraphCursor(graph, inputs, tuple(wanted or graph.outputs))


def test_counted_output_fans_out_and_joins_in_order():
    cursor = a_walk(digits(), page=np.zeros((2, 2), np.float32))
    (first,) = cursor.advance()
    assert (first.stage, first.rows) == ("locate", 2)

    cursor.complete("locate", {"found": np.array([1, 2]), "crops": np.ones((3, 3), np.float32)})
    (second,) = cursor.advance()
    assert (second.stage, second.rows, list(second.inputs)) == ("read", 3, ["crop"])

    cursor.complete("read", {"label": np.array([7, 8, 9])})
    assert cursor.advance() == []
    assert cursor.finished
    assert {name: array.tolist() for name, array in cursor.outputs().items()} == {"found": [1, 2], "labels": [7, 8, 9]}


def test_stage_without_rows_is_skipped_with_empty_outputs():
    cursor = a_walk(digits(), page=np.zeros((1, 2), np.float32))
    cursor.advance()
    cursor.complete("locate", {"found": np.array([0]), "crops": np.empty((0, 3), np.float32)})

    assert cursor.advance() == []
    assert cursor.finished
    labels = cursor.outputs()["labels"]
    assert (labels.shape, labels.dtype) == ((0,), np.dtype(np.int64))


def test_only_stages_that_the_wanted_outputs_need_run():
    cursor = a_walk(digits(), wanted=("found",), page=np.zeros((1, 2), np.float32))
    cursor.advance()
    cursor.complete("locate", {"found": np.array([2]), "crops": np.ones((2, 3), np.float32)})

    assert cursor.advance() == []
    assert list(cursor.outputs()) == ["found"]


def diamond(optional):
    join = a_stage(
        "join",
        inputs=[
            {"name": "l", "from": "left.outputs.y"},
            {"name": "r", "from": "right.outputs.y", "optional": optional},
        ],
    )
    return a_pipeline(
        [join, a_stage("left", "request.inputs.page"), a_stage("right", "request.inputs.note")],
        inputs=[PAGE, NOTE],
        outputs=[{"name": "y", "from": "join.outputs.y"}, {"name": "left", "from": "left.outputs.y"}],
    ).spec


Y = np.zeros((1, 4), np.float32)


def test_branches_run_side_by_side_and_join_once_both_are_there():
    cursor = a_walk(diamond(optional=False), page=Y, note=Y)
    assert {runnable.stage for runnable in cursor.advance()} == {"left", "right"}

    cursor.complete("left", {"y": Y})
    assert cursor.advance() == []
    cursor.complete("right", {"y": Y})
    (join,) = cursor.advance()
    assert list(join.inputs) == ["l", "r"]


def test_an_absent_input_skips_the_stage_and_whatever_needs_it():
    cursor = a_walk(diamond(optional=False), page=Y)
    assert [runnable.stage for runnable in cursor.advance()] == ["left"]

    cursor.complete("left", {"y": Y})
    assert cursor.advance() == []
    assert cursor.finished
    assert list(cursor.outputs()) == ["left"]


def test_a_stage_that_can_do_without_runs_without():
    cursor = a_walk(diamond(optional=True), page=Y)
    cursor.advance()
    cursor.complete("left", {"y": Y})

    (join,) = cursor.advance()
    assert list(join.inputs) == ["l"]


def test_what_follows_a_stage():
    graph = Graph(diamond(optional=True))

    assert (graph.downstream("left"), graph.downstream("join")) == (("join",), ())


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


@pytest.mark.parametrize("sizes", [(5, 6), (9, 12), (1, 1), (3, 3)])
def test_padded_rows_of_different_sizes_share_a_shape(sizes):
    tokens = {"name": "tokens", "datatype": "INT32", "shape": [-1, 2]}
    stage = a_stage("read", variants=[a_variant()])
    stage["inputs"] = [{"name": "tokens", "from": "request.inputs.tokens", "padding": -1}]
    graph = Graph(a_pipeline([stage], inputs=[tokens], outputs=[{"name": "y", "from": "read.outputs.y"}]).spec)
    rows = [np.arange(4 * size, dtype=np.int32).reshape(2, size, 2) for size in sizes]

    (first,), (second,) = (GraphCursor(graph, {"tokens": each}, ("y",)).advance() for each in rows)
    padded = first.inputs["tokens"]

    assert padded.shape == second.inputs["tokens"].shape == (2, sizes[1], 2)
    assert padded.dtype == np.int32
    np.testing.assert_array_equal(padded[:, : sizes[0]], rows[0])
    assert (padded[:, sizes[0] :] == -1).all()
