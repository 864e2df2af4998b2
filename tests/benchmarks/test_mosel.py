"""MOSEL's evaluation: the jobs that are served and simulated alike, what came of them, and what the page says of it."""

import multiprocessing
import sys
from argparse import ArgumentTypeError

import numpy as np
import pytest

from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import MOSEL, NONE, ONCE, OURS, SOURCE, Setting, plan_for
from benchmarks.mosel.__main__ import _loads, main
from benchmarks.mosel.beside import METHODS, MODEL, Beside, Pair, judged, served_measures, with_served
from benchmarks.mosel.cells import Cell, Measured
from benchmarks.mosel.conditions import conditions_of
from benchmarks.mosel.playing import PlayedPayloads, constant, played
from benchmarks.mosel.served_page import HEADS, SUM_HEADS, result_rows, sections, sum_rows
from benchmarks.mosel.serving import SERVED_AS
from tests.builders import a_point_profile, a_profile
from trimtab.report.html_page import Charts
from trimtab_adapter.simulation.environment import Environment
from trimtab_loadtester.payloads.digits_av import JobOptions
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine
from trimtab_protocol.extensions import ACCURACY_FLOOR

ACCURACIES = (0.43, 0.71, 0.91)
GOES = np.array([0.0, 0.5, 1.0, 0.2])
OPTIONS = JobOptions.parse("pool=200, drawn=0")


def test_job_rows_follow_the_load_and_floors_the_subsets():
    jobs = played(GOES, 400.0, ACCURACIES, seed=1)
    by_second = np.bincount(jobs.arrivals_seconds.astype(int), weights=jobs.rows)

    assert by_second.tolist() == [5, 202, 400, 84]
    assert (np.diff(jobs.arrivals_seconds) >= 0).all()
    assert 0.43 <= jobs.floors.min() < 0.5
    assert 0.85 < jobs.floors.max() <= 0.91
    assert jobs.jobs_rps * jobs.mean_rows == pytest.approx(691 / 4)
    assert constant(100.0, 3, ACCURACIES, seed=2).rows.sum() == 300


def test_what_is_sent_has_each_jobs_rows_and_floor_and_its_truth():
    jobs = played(GOES, 100.0, ACCURACIES, seed=1)
    source = PlayedPayloads(jobs, OPTIONS)
    for index in (0, 3, jobs.rows.size - 1):
        payload = source.payload(index)
        rows = jobs.rows[index]
        assert {tensor.array.shape[0] for tensor in payload.inputs} == {rows}
        assert payload.parameters == {ACCURACY_FLOOR: jobs.floors[index]}
        assert jobs.wishes[index].accuracy_floor == jobs.floors[index]
        score = source.score(payload.truth, {"digit": np.asarray(payload.truth)})
        assert (score.correct, score.total) == (rows, rows)


def test_jobs_that_took_turns_are_simulated_in_turns():
    jobs = played(GOES, 100.0, ACCURACIES, seed=1)
    turns = jobs.in_turns(3)

    assert turns.rows.size == jobs.rows.size
    assert turns.rows[3:6].tolist() == turns.rows[:3].tolist() == jobs.rows[:3].tolist()
    assert turns.floors[4] == jobs.floors[1]
    assert jobs.in_turns(jobs.rows.size).rows.tolist() == jobs.rows.tolist()


def a_record(outcome=RequestOutcome.OK, latency=0.2, expected=0.8, **changes):
    answered = {"correct": 3, "total": 4, "expected_accuracy": expected} if outcome <= RequestOutcome.LATE else {}
    sent = changes.pop("sent", 0.0)
    return Record(0.0, sent, latency, outcome, "200", **{"floor": 0.75, **answered, **changes})


def a_run(records):
    return Run("ours", 2.0, Results.of(RunFacts("digits-av", "constant:2", 2.0, 1.0, ("name",), 0.0), records), {}, 1)


def test_served_jobs_give_the_same_measures_as_simulated():
    cell = Cell(MODEL, "Mosel", 1.0)
    one = served_measures(
        cell,
        a_run(
            [
                a_record(escalation_pending=1),
                a_record(expected=0.7, latency=0.4),
                a_record(RequestOutcome.LATE, latency=1.2),
                a_record(RequestOutcome.DROPPED, latency=0.9),
            ]
        ),
    )

    assert (one.cell, one.jobs, one.violations, one.met) == (cell, 4, 0.5, 0.25)
    assert one.answered_rps == 4.0
    assert one.mean_seconds == pytest.approx(0.6)
    assert one.provisional == 0.25
    assert one.accuracy == pytest.approx(2.3 / 3)


def test_conditions_hold_batch_and_surrounding_seconds():
    point = a_point_profile("late", 0.01, 0.001)
    batches = [
        (size, (2.0 if size == 4 else 1.0) * point.latency_seconds(size, 0.5) * (1 + 0.001 * number))
        for number in range(20)
        for size in (4, 8)
    ]
    records = [
        a_record(latency=0.105 + seconds, sent=0.005, visits={"name": StageVisit("late", size, 0.03, seconds)})
        for size, seconds in batches
        for _ in range(2)
    ]
    found, key = conditions_of(a_run(records), point), ("name", "late")

    assert found.before_seconds == pytest.approx(0.07)
    ratios = {size: found.service_ratios[key] * ratio for size, ratio in found.size_ratios[key].items()}
    assert ratios == {4: pytest.approx(2.0, rel=0.03), 8: pytest.approx(1.0, rel=0.03)}
    assert len(found.factors[key]) == len(batches)
    assert max(found.factors[key]) < 1.05


def test_run_without_answers_has_no_conditions():
    with pytest.raises(ValueError, match="none of 1 jobs"):
        conditions_of(a_run([a_record(RequestOutcome.DROPPED)]), a_point_profile("late"))


def test_run_without_answers_has_no_mean_time():
    one = served_measures(Cell(MODEL, "Mosel", 1.0), a_run([a_record(RequestOutcome.DROPPED)]))

    assert (one.violations, one.met, one.answered_rps) == (1.0, 0.0, 0.0)
    assert np.isnan([one.mean_seconds, one.accuracy]).all()


def measured(method, factor, violations, met):
    return Measured(Cell(MODEL, method, factor), 100, violations, met, 0.8, 50 * factor, 0.2, 0.0, 0.0, {})


def machine(*ratios):
    return {0.5 * n: Environment(service_ratios={("name", "late"): ratio}) for n, ratio in enumerate(ratios, 1)}


def a_beside(ours=0.0, theirs=0.1, simulated=0.05, lost=0):
    pairs = [
        Pair(measured(method, factor, lost, 1 - lost), measured(method, factor, simulated, 0.9), 0.81, (0.8, 0.7, 0.9))
        for factor in (0.5, 1.0)
        for method in METHODS
        for lost in (ours if method == "ModalityMix" else theirs,)
    ]
    return Beside(pairs, "made up", 120.0, 1.2, 0.25, True, machine(0.9, 1.1), "synthesised voices", lost)


def test_thresholds_compare_policies_and_simulated_to_served():
    figures, bars = judged(a_beside())

    assert all(bar.holds for bar in bars)
    assert figures["served_modalitymix_carried_rows_rps"] == 50.0
    assert figures["served_mosel_carried_rows_rps"] == pytest.approx(2.5)
    assert figures["simulated_mosel_violations"] == pytest.approx(0.05)
    assert figures["served_violations_off_simulated_points"] == pytest.approx(5.0)
    assert figures["served_batches_over_planned_at_load_0.5"] == 0.9
    assert figures["served_batches_over_profile"] == 1.2
    _, worse = judged(a_beside(ours=0.2, lost=1))
    assert not any(bar.holds for bar in worse)


def test_the_verdict_of_the_simulated_models_stays():
    both = with_served(ResultLine(name="reproduce-mosel", figures={"cells": 7}), a_beside())

    assert both.name == "reproduce-mosel"
    assert both.figures["cells"] == 7
    assert len(both.bars) == 3


def test_the_page_shows_every_policy_served_beside_simulated():
    drawn: Charts = {}
    html = "".join(sections(a_beside(), drawn))
    lines = [chart for name, chart in drawn.items() if "throughput" not in name]

    assert len(drawn) == 4
    assert all(method in html for method in METHODS)
    assert all(len(chart.data) == 2 * len(METHODS) for chart in lines)
    assert [row[1] for row in result_rows(a_beside())] == [*METHODS, *METHODS]
    assert {len(row) for row in result_rows(a_beside())} == {len(HEADS)}
    assert {len(row) for row in sum_rows(a_beside())} == {len(SUM_HEADS)}
    assert "a router was lost" not in html
    assert "In 2 of these loads a router was lost" in "".join(sections(a_beside(lost=2), {}))


def test_every_policy_of_the_page_is_served_as_one_of_its_own():
    assert set(SERVED_AS) == set(METHODS)
    assert len(set(SERVED_AS.values())) == len(METHODS)


@pytest.mark.parametrize("method", [OURS, ONCE, MOSEL, NONE])
def test_ours_alone_looks_twice(tmp_path, method):
    setting = Setting(tmp_path, SOURCE, method)
    pipeline = setting.write()
    names = [point.name for point in pipeline.spec.stage("name").variant("late").points]
    points = [
        a_point_profile("late", 0.002, 0.0005 / (1 + place)).model_copy(update={"operating_point": name})
        for place, name in enumerate(names)
    ]
    (stage,) = plan_for(setting, pipeline, {"name": a_profile("name", points)}, 10.0, 5.0, 1).spec.stages

    assert len(stage.points) == len(names)
    assert any(point.escalations for point in stage.points) == (method == OURS)


def test_loads_are_numbers_above_zero():
    assert _loads("2,0.5,1") == (0.5, 1.0, 2.0)
    for wrong in ("", "0", "1,-2", "much", "inf", "nan"):
        with pytest.raises(ArgumentTypeError, match="write numbers above 0"):
            _loads(wrong)


def test_missing_recordings_are_reported_before_simulating(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: pytest.fail("cells are simulated"))
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--recordings", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["mosel", "--served", *places])

    assert main() == 1
    assert f"{tmp_path / 'none'}" in capsys.readouterr().err
