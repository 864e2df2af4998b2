"""Graph cursor: fan-out, join, skipped stages."""

import numpy as np

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_router.execution.graph import Graph, GraphCursor

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
