"""OTAS's evaluation: utility and types of queries by policy, simulated and served."""

import numpy as np
import pytest

from benchmarks.harness.grid import Cell
from benchmarks.harness.report import Report
from benchmarks.papers import otas_served
from benchmarks.papers.otas import INFAAS, METHODS, TOME, VPT, build_page, judge, measure, table_rows
from benchmarks.papers.otas_queries import (
    BURSTY,
    OTAS,
    OURS,
    PETS,
    SYNTHETIC,
    QueryEvaluation,
    bursty_rps,
    synthetic_rps,
)
from benchmarks.papers.otas_served import QUERIES, SOURCE, STAGE, VARIANT, Comparison, Queries, ServedLoad
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_router.scheduling.policies import POLICIES

RATES = bursty_rps(None, 0, 5)


def simulated(method, factor=1.6):
    return measure(RATES, Cell((SYNTHETIC,), method, factor))


@pytest.fixture(scope="module")
def overloaded():
    """A rate above what the plain model carries."""
    return {name: simulated(name) for name in (OURS, OTAS, PETS, INFAAS, TOME, VPT)}


def test_ours_has_the_most_utility_in_overload(overloaded):
    assert overloaded[OURS].utility > max(row.utility for name, row in overloaded.items() if name != OURS)


def test_every_query_has_one_type(overloaded):
    for row in overloaded.values():
        assert sum(row.types) == pytest.approx(1.0)
        assert min(row.types) >= -1e-9


def test_policy_without_deadlines_is_late_and_fixed_one_stays(overloaded):
    assert overloaded[PETS].types[2] > 0.1
    assert set(overloaded[TOME].points) == {"g-15"}
    assert len(overloaded[OURS].points) > 2


def test_queries_wait_for_a_model_that_is_loaded():
    row = simulated(INFAAS, 1.0)

    assert {"small", "base"} <= set(row.points)
    assert row.types[2] + row.types[3] > 0.02


def test_the_loads_are_the_papers():
    synthetic, bursty = synthetic_rps(2000, 1), bursty_rps(None, 0, 2000)

    assert synthetic.min() >= 200.0
    assert synthetic.max() <= 700.0
    assert np.quantile(bursty, 0.6) == pytest.approx(300.0)
    assert bursty.max() > 600.0


def served_record(at_seconds, point, *, right=True, latency_seconds=0.1, expected=0.7):
    visits = {STAGE: StageVisit("vit-fine", 8, 0.0, 0.01, point)}
    answer = {"correct": int(right), "total": 1, "expected_accuracy": expected, "visits": visits}
    return Record(at_seconds, at_seconds, latency_seconds, RequestOutcome.OK, "200", **answer)


def dropped(at_seconds):
    return Record(at_seconds, at_seconds, 0.1, RequestOutcome.DROPPED, "504")


def a_load(workload, method, *records, deadlines=0.5, utilities=1.0):
    results = Results.of(RunFacts("vit-tasks", "load", 4.0, 1.0, (STAGE,), 0.0), records)
    n = len(records)
    return ServedLoad(Cell((workload,), method), results, np.full(n, deadlines), np.full(n, utilities))


def a_comparison():
    good, fast = served_record(0.0, "full", expected=0.8), served_record(2.5, "merge-32")
    late = served_record(3.0, "full", latency_seconds=0.9)
    loads = [
        a_load(workload, method, *records)
        for workload in (SYNTHETIC, BURSTY)
        for method, records in (
            (OURS, (good, fast, served_record(3.0, "merge-32"))),
            (OTAS, (good, served_record(2.5, "full", right=False), dropped(3.0))),
            (PETS, (good, fast, late)),
        )
    ]
    return Comparison(loads, capacity_rps=58.0, scale=0.1)


def test_page_and_report_name_every_method_simulated_and_served():
    rates = bursty_rps(None, 0, 2)
    cells = [Cell((workload,), method) for workload in (SYNTHETIC, BURSTY) for method in METHODS]
    evaluation = QueryEvaluation([measure(rates, cell) for cell in cells])
    report = judge(evaluation, "made up")
    otas_served.judge(a_comparison(), report)
    html = build_page(evaluation, report, "made up", a_comparison()).render()

    assert all(method in html for method in METHODS)
    assert "Served: what became of the queries" in html
    assert "Served:" not in build_page(evaluation, report, "made up").render()
    assert len(table_rows(evaluation)) == 2 * len(METHODS)
    assert len(report.bars) == 8
    assert {"bursty_gain_over_otas", "served_bursty_otas_utility"} <= set(report.figures)


def test_served_load_is_summed_up_as_a_simulated_one():
    wrong = served_record(2.5, "merge-32", right=False)
    row = a_load(BURSTY, OURS, served_record(0.0, "full", expected=0.8), wrong, dropped(3.0)).row

    assert (row.queries, row.utility) == (3, 1.0)
    assert row.types == pytest.approx((1 / 3, 1 / 3, 0.0, 1 / 3))
    assert row.points == {"full": 0.5, "merge-32": 0.5}


def test_each_query_has_its_own_deadline_and_utility():
    records = [served_record(i, "full", latency_seconds=0.4, right=i != 2) for i in range(3)]
    load = a_load(BURSTY, OURS, *records, dropped(3), deadlines=[0.5, 0.3, 0.5, 0.5], utilities=[1.0, 5.0, 2.0, 3.0])

    assert load.types == (0.25, 0.25, 0.25, 0.25)
    assert load.gained.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert load.expected_utility == pytest.approx(0.7 * (1.0 + 2.0))
    assert load.accuracy()[0] == pytest.approx(2 / 3)
    assert load.utility_interval()[0] <= 1.0 <= load.utility_interval()[1]


def test_served_methods_are_compared_with_ours():
    comparison, report = a_comparison(), Report("otas")
    otas_served.judge(comparison, report)
    rows, bars = otas_served.table_rows(comparison), {bar.bar: bar.holds for bar in report.bars}

    assert [row[:2] for row in rows[:3]] == [(SYNTHETIC, OURS), (SYNTHETIC, OTAS), (SYNTHETIC, PETS)]
    assert rows[1][otas_served.COLUMNS.index("ours beside it")] == "+200.0 %"
    assert report.figures["served_bursty_gain_over_pets_like"] == pytest.approx(0.5)
    assert bars["served: utility over OTAS as printed in any load, least, %"]
    assert not bars["served: queries by each method, least"], "too few show nothing"


def test_each_served_method_has_a_policy_and_a_point():
    points = {point.name for point in load_pipeline(SOURCE / "pipeline.yaml").spec.stage(STAGE).variant(VARIANT).points}

    assert {method.policy for method in otas_served.METHODS} <= set(POLICIES)
    assert {method.point for method in otas_served.METHODS if method.point} <= points


def test_queries_have_task_deadline_utility_and_label():
    queries, kinds = Queries(0.6, seed=1), set()
    for index in range(40):
        kind = queries.kind(index)
        payload = queries.payload(index)
        kinds.add(kind)
        assert payload.parameters["trimtab.task"] == QUERIES[kind].task
        assert payload.parameters["timeout"] == round(1e6 * queries.deadline(kind))
        label = np.array([payload.truth])
        assert queries.score(payload.truth, {"label": label}).correct == 1
        assert queries.score(payload.truth, {"label": label + 1}).correct == 0

    assert kinds == set(range(len(QUERIES)))
