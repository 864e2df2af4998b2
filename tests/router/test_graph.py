"""Requests walk through the DAG: fan-out, join, skipped stages."""

import numpy as np

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_router.request.graph import Graph, GraphCursor

PAGE = {"name": "page", "datatype": "FP32", "shape": [2]}
NOTE = {"name": "note", "datatype": "FP32", "shape": [1], "optional": True}


def locate(**changes):
    """Finds crops on pages: a counted output."""
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


def test_a_counted_output_fans_out_and_its_rows_come_back_in_order():
    walk = a_walk(digits(), page=np.zeros((2, 2), np.float32))
    (first,) = walk.advance()
    assert (first.stage, first.rows) == ("locate", 2)

    walk.complete("locate", {"found": np.array([1, 2]), "crops": np.ones((3, 3), np.float32)})
    (second,) = walk.advance()
    assert (second.stage, second.rows, list(second.inputs)) == ("read", 3, ["crop"])

    walk.complete("read", {"label": np.array([7, 8, 9])})
    assert walk.advance() == []
    assert walk.finished
    assert {name: array.tolist() for name, array in walk.answer().items()} == {"found": [1, 2], "labels": [7, 8, 9]}


def test_no_rows_to_fan_out_into_skips_the_stage_and_gives_empty_outputs_of_the_right_shape():
    walk = a_walk(digits(), page=np.zeros((1, 2), np.float32))
    walk.advance()
    walk.complete("locate", {"found": np.array([0]), "crops": np.empty((0, 3), np.float32)})

    assert walk.advance() == []
    assert walk.finished
    labels = walk.answer()["labels"]
    assert (labels.shape, labels.dtype) == ((0,), np.dtype(np.int64))


def test_only_stages_that_the_wanted_outputs_need_run():
    walk = a_walk(digits(), wanted=("found",), page=np.zeros((1, 2), np.float32))
    walk.advance()
    walk.complete("locate", {"found": np.array([2]), "crops": np.ones((2, 3), np.float32)})

    assert walk.advance() == []
    assert list(walk.answer()) == ["found"]


def diamond(optional):
    """Left and right read the request; join reads both, the right one perhaps optionally."""
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
    walk = a_walk(diamond(optional=False), page=Y, note=Y)
    assert {runnable.stage for runnable in walk.advance()} == {"left", "right"}

    walk.complete("left", {"y": Y})
    assert walk.advance() == []
    walk.complete("right", {"y": Y})
    (join,) = walk.advance()
    assert list(join.inputs) == ["l", "r"]


def test_an_absent_input_skips_the_stage_and_whatever_needs_it():
    walk = a_walk(diamond(optional=False), page=Y)
    assert [runnable.stage for runnable in walk.advance()] == ["left"]

    walk.complete("left", {"y": Y})
    assert walk.advance() == []
    assert walk.finished
    assert list(walk.answer()) == ["left"]


def test_a_stage_that_can_do_without_runs_without():
    walk = a_walk(diamond(optional=True), page=Y)
    walk.advance()
    walk.complete("left", {"y": Y})

    (join,) = walk.advance()
    assert list(join.inputs) == ["l"]


def test_what_follows_a_stage():
    graph = Graph(diamond(optional=True))

    assert (graph.following("left"), graph.following("join")) == (("join",), ())
