"""Methods served on the paper's loads, and their comparison with the simulation."""

import numpy as np
import pytest

from benchmarks.otas import load
from benchmarks.otas.beside import HEADS, Beside, Served
from benchmarks.otas.ceiling import ceiling
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Source, measure
from benchmarks.otas.evaluation import Evaluation, judge
from benchmarks.otas.measured import Cell, Measured
from benchmarks.otas.methods import METHODS, OTAS, OURS, PETS
from benchmarks.otas.page import render
from benchmarks.otas.served import METHODS as SERVED
from benchmarks.otas.served import fastest_first, scale_of
from benchmarks.tokens_served.driving import SOURCE, VARIANT, point_named, written
from benchmarks.tokens_served.outcome import Run
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import PointPlan
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_router.scheduling.policies import POLICIES

FACTS = RunFacts("vit-tasks", "load", 4.0, 1.0, ("classify",), 0.0)


def answer(at_seconds, point, *, right=True, latency_seconds=0.1, promised=0.7):
    visits = {"classify": StageVisit("vit-fine", 8, 0.0, 0.01, point)}
    return Record(
        at_seconds,
        at_seconds,
        latency_seconds,
        RequestOutcome.OK,
        "200",
        correct=int(right),
        total=1,
        expected_accuracy=promised,
        visits=visits,
    )


def dropped(at_seconds):
    return Record(at_seconds, at_seconds, 0.1, RequestOutcome.DROPPED, "504")


def served(workload, method, *records):
    run = Run(method, Results.of(FACTS, records), np.full(len(records), 0.5), np.ones(len(records)), 0.5, 9, 3.0)
    cell = Cell(workload, method)
    return Served(cell, run, Measured(cell, len(records), 1.5, (1.0, 0.0, 0.0, 0.0), {}, [], []))


def a_comparison():
    found = []
    for workload in (SYNTHETIC, BURSTY):
        good, fast = answer(0.0, "full", promised=0.8), answer(2.5, "merge-32")
        found.append(served(workload, OURS, good, fast, answer(3.0, "merge-32")))
        found.append(served(workload, OTAS, good, answer(2.5, "full", right=False), dropped(3.0)))
        found.append(served(workload, PETS, good, fast, answer(3.0, "full", latency_seconds=0.9, promised=0.8)))
    return Beside(found, capacity_rps=58.0, scale=0.1, points=["merge-32", "full"])


def test_a_served_load_is_summed_up_as_a_simulated_one_is():
    one = served(BURSTY, OURS, answer(0.0, "full", promised=0.8), answer(2.5, "merge-32", right=False), dropped(3.0))
    measured = one.measured

    assert measured.queries == 3
    assert measured.utility == 1.0
    assert measured.types == pytest.approx((1 / 3, 1 / 3, 0.0, 1 / 3))
    assert measured.shares == {"full": 0.5, "merge-32": 0.5}
    assert measured.over_time == [(0.5, {"full": 1.0}), (1.0, {"merge-32": 1.0})]
    assert (measured.accuracies[0], measured.accuracies[-1]) == (0.7, 0.8)


def test_unanswered_load_has_no_points_and_accuracies():
    measured = served(BURSTY, OURS, dropped(0.0), dropped(1.0)).measured

    assert measured.types == (0.0, 0.0, 0.0, 1.0)
    assert (measured.shares, measured.accuracies) == ({}, [])


def test_methods_are_compared_with_ours_and_the_simulation():
    found = a_comparison()
    rows, figures = found.rows(), found.figures()

    assert [row[:2] for row in rows[:3]] == [(SYNTHETIC, OURS), (SYNTHETIC, OTAS), (SYNTHETIC, PETS)]
    assert {len(row) for row in rows} == {len(HEADS)}
    assert rows[1][HEADS.index("ours beside it")] == "+200.0 %"
    assert figures["served_bursty_gain_over_pets_like"] == pytest.approx(0.5)
    assert figures["served_bursty_tokenadaptive_utility_simulated"] == 1.5
    assert figures["served_synthetic_pets_like_type_3"] == pytest.approx(1 / 3)


def test_few_queries_show_nothing_whatever_they_say():
    bars = {each.bar: each for each in a_comparison().bars()}

    assert bars["served: utility over OTAS as printed in any load, least, %"].holds
    assert not bars["served: queries by each method, least"].holds


def test_what_was_served_stands_on_the_page_and_in_the_verdict():
    short, found = Source(load.bursty_rps(None, 0, 2)), a_comparison()
    cells = [Cell(workload, method) for workload in (SYNTHETIC, BURSTY) for method in METHODS]
    ceilings = [ceiling(short, cell) for cell in cells if cell.method == OURS]
    evaluation = Evaluation([measure(short, cell) for cell in cells], ceilings, "made up")
    outcome = judge(evaluation, found.figures(), found.bars())

    assert "Served beside simulated" in render(evaluation, found)
    assert "Served" not in render(evaluation)
    assert len(outcome.bars) == len(judge(evaluation).bars) + 3
    assert {"synthetic_otas_utility", "served_synthetic_otas_utility"} <= outcome.figures.keys()


def test_paper_loads_are_scaled_to_the_machine():
    assert scale_of(580.0) == 1.0
    assert scale_of(58.0) == pytest.approx(0.1)


def test_each_served_method_has_a_policy_and_a_point():
    transformer = load_pipeline(SOURCE / "pipeline.yaml").spec.stage("classify").variant(VARIANT)
    points = {point.name for point in transformer.points}

    assert {method.policy for method in SERVED} <= set(POLICIES)
    assert {method.point for method in SERVED if method.point} <= points
    assert len({method.name for method in SERVED}) == len(SERVED) == 6


def test_method_without_drops_gets_that_drop_policy(tmp_path):
    kept = written(SOURCE, tmp_path / "never", "PetsLike", 2.0, "Never")

    assert (kept.spec.drop_policy, kept.spec.scheduling_policy) == ("Never", "PetsLike")
    assert written(SOURCE, tmp_path / "usual", "Otas", 2.0).spec.drop_policy == "Predicted"


def test_points_are_found_by_name_and_sorted_by_speed():
    seconds = {"full": 0.3, "merge-32": 0.1, "merge-16": 0.2}
    points = [PointPlan(name=name, accuracy=0.5, service_seconds={8: each}) for name, each in seconds.items()]

    assert point_named(points, "merge-32") is points[1]
    assert fastest_first(points) == ["merge-32", "merge-16", "full"]
