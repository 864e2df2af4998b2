"""Queries of three tasks with deadlines and utilities, and what is counted of what became of them."""

import numpy as np
import pytest

from benchmarks.tokens_served.direct import mixed, split
from benchmarks.tokens_served.outcome import Run
from benchmarks.tokens_served.queries import QUERIES, Queries
from benchmarks.tokens_served.tasks import ratio_interval
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.ends import End


def a_run(*records, deadlines, utilities):
    facts = RunFacts("p", "load", 10.0, 1.0, (), 0.0)
    return Run("m", Results.of(facts, records), np.array(deadlines), np.array(utilities), 0.5, 9, 3.0)


def answered(at, seconds, *, right, promised=0.8):
    return Record(at, at, seconds, End.OK, "200", correct=int(right), total=1, expected_accuracy=promised)


def test_each_query_is_judged_by_its_own_deadline_and_utility():
    run = a_run(
        answered(0, 0.4, right=True),
        answered(1, 0.4, right=True),
        answered(2, 0.1, right=False),
        Record(3, 3, 0.1, End.DROPPED, "504"),
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


def test_queries_name_their_task_deadline_and_utility_and_know_their_label():
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


def test_batches_of_mixed_tasks_are_full_and_split_ones_hold_one_task():
    waiting = [3, 1, 3, 2, 3, 1, 0, 2, 3, 3]

    assert mixed(waiting) == list(range(8))
    assert split(waiting) == [0, 2, 4, 8, 9]


def test_the_ratio_of_two_p99s_has_an_interval_around_it():
    random = np.random.default_rng(1)
    calm = random.exponential(1.0, 4000)
    low, high = ratio_interval(1.5 * random.exponential(1.0, 4000), calm)

    assert 1.2 < low < 1.5 < high < 1.9
    assert np.allclose(ratio_interval(calm, calm)[0], 1.0, atol=0.2)
