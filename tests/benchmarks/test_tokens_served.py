"""Queries of three tasks with deadlines and utilities, and what is counted of what became of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from benchmarks.tokens_served.__main__ import POLICIES as SERVED
from benchmarks.tokens_served.direct import mixed, split
from benchmarks.tokens_served.driving import SHAPE, around, shape_of
from benchmarks.tokens_served.looks import Rows, Way, compared, serve, ways
from benchmarks.tokens_served.outcome import Run
from benchmarks.tokens_served.queries import QUERIES, Queries
from benchmarks.tokens_served.tasks import ratio_interval
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.escalation import EscalationPlan, TaskEscalation
from trimtab_pipelines.plan import PointPlan
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_predictor.trace import TraceError
from trimtab_protocol import InferResponse, Tensor
from trimtab_router.scheduling.policies import POLICIES
from trimtab_training.vit_tasks.labelled_samples import HeldOut


def a_run(*records, deadlines, utilities):
    facts = RunFacts("p", "load", 10.0, 1.0, (), 0.0)
    return Run("m", Results.of(facts, records), np.array(deadlines), np.array(utilities), 0.5, 9, 3.0)


def answered(at, seconds, *, right, promised=0.8):
    return Record(at, at, seconds, RequestOutcome.OK, "200", correct=int(right), total=1, expected_accuracy=promised)


def test_each_query_is_judged_by_its_own_deadline_and_utility():
    run = a_run(
        answered(0, 0.4, right=True),
        answered(1, 0.4, right=True),
        answered(2, 0.1, right=False),
        Record(3, 3, 0.1, RequestOutcome.DROPPED, "504"),
        deadlines=[0.5, 0.3, 0.5, 0.5],
        utilities=[1.0, 5.0, 2.0, 3.0],
    )

    assert run.types == (0.25, 0.25, 0.25, 0.25)
    assert run.utility == 1.0
    assert run.expected_utility == pytest.approx(0.8 * (1.0 + 2.0))
    assert run.missed == 0.5
    assert run.accuracy()[0] == pytest.approx(2 / 3)
    assert run.interval()[0] <= run.utility <= run.interval()[1]
    assert run.line()[0] == "m"


def test_queries_have_task_deadline_utility_and_label():
    queries = Queries(0.6, seed=1)
    seen = set()
    for index in range(40):
        kind = queries.kind(index)
        payload = queries.payload(index)
        seen.add(kind)
        assert payload.parameters["trimtab.task"] == QUERIES[kind].task
        assert payload.parameters["timeout"] == round(1e6 * queries.seconds(kind))
        label = np.array([payload.truth])
        assert queries.score(payload.truth, {"label": label}).correct == 1
        assert queries.score(payload.truth, {"label": label + 1}).correct == 0

    assert seen == set(range(len(QUERIES)))


def test_mixed_batches_are_full_and_split_ones_hold_one_task():
    waiting = [3, 1, 3, 2, 3, 1, 0, 2, 3, 3]

    assert mixed(waiting) == list(range(8))
    assert split(waiting) == [0, 2, 4, 8, 9]


def test_the_ratio_of_two_p99s_has_an_interval_around_it():
    random = np.random.default_rng(1)
    calm = random.exponential(1.0, 4000)
    low, high = ratio_interval(1.5 * random.exponential(1.0, 4000), calm)

    assert 1.2 < low < 1.5 < high < 1.9
    assert np.allclose(ratio_interval(calm, calm)[0], 1.0, atol=0.2)


def a_point(name, accuracy, row_seconds, *looks):
    return PointPlan(name=name, accuracy=accuracy, service_seconds={8: 8 * row_seconds}, escalations=looks)


def a_look(then, share, accuracy):
    return EscalationPlan(to=then, confidence_below=share, share=share, accuracy=accuracy)


def test_each_point_escalates_the_fewest_rows_for_the_target():
    points = [
        a_point("full", 0.8, 1.0),
        a_point("middle", 0.795, 0.6, a_look("full", 0.5, 0.8)),
        a_point(
            "fast",
            0.7,
            0.3,
            a_look("full", 0.3, 0.79),
            a_look("full", 0.4, 0.798),
            a_look("full", 0.6, 0.799),
            a_look("middle", 0.2, 0.75),
            a_look("middle", 0.4, 0.78),
        ),
    ]
    found = ways(points)

    assert [way.name for way in found] == [
        "full",
        "middle",
        "fast",
        "fast, 40% again at full",  # the least share that loses no more than 0.3 points
        "fast, 40% again at middle",  # none reaches that: the most accurate
    ], "middle with half of the rows again at full is slower than full"
    assert [way.promised for way in found[3:]] == [0.798, 0.78]


@dataclass(frozen=True)
class Replica:
    """Certain of even rows; right of all at `full`, of even rows alone at `fast`."""

    pixels: np.ndarray
    seen: list[tuple[str, int]] = field(default_factory=list)

    async def infer(self, tasks, point):
        row = self.pixels[:, 0]
        assert (row % 4).tolist() == tasks
        self.seen.append((point, len(row)))
        label = np.where((row % 2 == 0) | (point == "full"), row, -1)
        confidence = np.where(row % 2 == 0, 0.9, 0.1).astype(np.float32)
        return InferResponse("m", outputs=(Tensor.of("label", label), Tensor.of("confidence", confidence)))


def test_a_way_doubts_each_task_by_its_own_threshold():
    by_task = {
        "crops": TaskEscalation(confidence_below=0.4, share=0.1, accuracy=0.9),
        "digits": TaskEscalation(confidence_below=0, share=0, accuracy=0.4),
    }
    look = EscalationPlan(to="full", confidence_below=0.2, share=0.1, accuracy=0.6, by_task=by_task)
    way = Way("w", a_point("fast", 0.5, 1.0, look), a_point("full", 1.0, 2.0))

    assert way.below.tolist() == [0.4, 0.0, 0.0, 0.0], "tasks without a threshold are not escalated"


async def test_escalated_rows_fill_batches_and_none_is_left():
    numbers = np.arange(40)
    rows = Rows(numbers[:, None].astype(np.uint8), numbers % 4, numbers)
    replica: Any = Replica(rows.pixels)
    way = Way("w", a_point("fast", 0.5, 1.0, a_look("full", 0.5, 1.0)), a_point("full", 1.0, 2.0))
    await serve(replica, way, rows, numbers[:36])

    assert [rows for point, rows in replica.seen if point == "fast"] == [8, 8, 8, 8, 4]
    assert [rows for point, rows in replica.seen if point == "full"] == [8, 8, 2]
    assert all(way.right)
    assert (way.doubted, len(way.right), len(way.seconds)) == (18, 36, 1)


def test_option_is_compared_with_the_plain_point_by_rows():
    plain = Way("plain", a_point("full", 0.8, 1.0), seconds=[2.0, 4.0, 2.0], right=[True] * 800 + [False] * 200)
    fast = Way("fast", a_point("fast", 0.8, 1.0), seconds=[1.0, 2.0, 2.0], right=[True] * 790 + [False] * 210)
    first, second = compared([plain, fast])

    assert (first.meets, first.speeds) == (False, (1.0, 1.0, 1.0))
    assert second.speeds == (1.0, 2.0, 2.0)
    assert second.lost[1] == pytest.approx(0.01)
    assert second.lost[0] < 0.01 < second.lost[2]
    assert not second.meets, "it loses a point"
    assert second.rows_per_second == 200.0


def test_second_set_shares_no_row_with_the_measured_one():
    rows = Rows.drawn()
    first = HeldOut()
    known = {first[place][0]["image"].tobytes() for place in range(len(first) - 80)}  # faces are all there are

    assert len(rows.labels) > 3000
    assert np.mean([pixels.tobytes() in known for pixels in rows.pixels]) < 0.01, "some crops are drawn twice"
    assert len(np.concatenate(rows.turns())) == len(rows.labels)
    assert len(np.concatenate(rows.turns(200))) == 200


def test_the_papers_rivals_are_served_too():
    assert {"TokenAdaptive", "Otas", "PetsLike", "InfaasLike"} <= set(SERVED.values()) <= set(POLICIES)


def test_a_load_goes_as_plateaus_of_ours_or_as_a_trace_does(tmp_path):
    trace = tmp_path / "rps.csv"
    trace.write_text("rps\n7\n10\n0\n20\n30\n")

    assert shape_of(None, 0, 4) is SHAPE
    assert around(SHAPE, 50.0, SHAPE.size).mean() == pytest.approx(50.0)
    assert around(shape_of(trace, 1, 4), 30.0, 4).tolist() == pytest.approx([20.0, 0.0, 40.0, 60.0])
    with pytest.raises(TraceError, match=r"rps\.csv: cannot cut"):
        shape_of(trace, 3, 4)
