"""MOSEL's evaluation: jobs that are served and simulated alike, what becomes of them, and the page."""

from argparse import ArgumentTypeError
from multiprocessing.context import SpawnContext
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main as run_benchmark
from benchmarks.harness import serving
from benchmarks.harness.grid import Cell
from benchmarks.harness.report import Page, Report
from benchmarks.harness.serving import limit_cores, slow_down, write_pipeline
from benchmarks.papers.mosel import parse_loads
from benchmarks.papers.mosel_jobs import MOSEL, OURS, PLAIN, JobRow, draw_jobs
from benchmarks.papers.mosel_served import (
    COLUMNS,
    METHODS,
    MODEL,
    SOURCE,
    Comparison,
    JobPayloads,
    add_sections,
    judge,
    measured_accuracy,
    plan_load,
    served_row,
    service_ratio,
    table_rows,
)
from tests.builders import a_point_profile, a_profile
from trimtab_loadtester.payloads.digits_av import JobOptions
from trimtab_loadtester.results import Record, Results, RunFacts, StageVisit
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_protocol.extensions import ACCURACY_FLOOR

ACCURACIES = (0.43, 0.71, 0.91)
SHAPE = np.array([0.0, 0.5, 1.0, 0.2])


def test_job_rows_follow_the_load_and_floors_the_subsets():
    jobs = draw_jobs(SHAPE, 400.0, ACCURACIES)
    by_second = np.bincount(jobs.arrivals_seconds.astype(int), weights=jobs.rows)

    assert by_second.tolist() == [5, 202, 400, 84]
    assert (np.diff(jobs.arrivals_seconds) >= 0).all()
    assert 0.43 <= jobs.floors.min() < 0.5
    assert 0.85 < jobs.floors.max() <= 0.91
    assert jobs.jobs_rps * jobs.rows.mean() == pytest.approx(691 / 4)


def test_payload_has_the_rows_floor_and_labels_of_its_job():
    jobs = draw_jobs(SHAPE, 100.0, ACCURACIES)
    source = JobPayloads(jobs, JobOptions.parse("pool=200, drawn=0"))
    for index in (0, 3, jobs.rows.size - 1):
        payload, rows = source.payload(index), jobs.rows[index]
        assert {tensor.array.shape[0] for tensor in payload.inputs} == {rows}
        assert payload.parameters == {ACCURACY_FLOOR: round(jobs.floors[index], 4)}
        score = source.score(payload.truth, {"digit": np.asarray(payload.truth)})
        assert (score.correct, score.total) == (rows, rows)


def a_record(outcome=RequestOutcome.OK, latency=0.2, expected=0.8, **changes):
    answered = {"correct": 3, "total": 4, "expected_accuracy": expected} if outcome <= RequestOutcome.LATE else {}
    sent = changes.pop("sent", 0.0)
    return Record(0.0, sent, latency, outcome, "200", **{"floor": 0.75, **answered, **changes})


def results_of(records):
    return Results.of(RunFacts("digits-av", "constant:2", 2.0, 1.0, ("name",), 0.0), records)


def test_served_jobs_give_the_same_figures_as_simulated():
    records = [
        a_record(escalation_pending=1),
        a_record(expected=0.7, latency=0.4),
        a_record(RequestOutcome.LATE, latency=1.2),
        a_record(RequestOutcome.DROPPED, latency=0.9),
    ]
    row = served_row(Cell((MODEL,), MOSEL), results_of(records))

    assert (row.jobs, row.violations, row.met) == (4, 0.5, 0.25)
    assert (row.answered_rps, row.pending) == (4.0, 0.25)
    assert row.mean_seconds == pytest.approx(0.6)
    assert row.accuracy == pytest.approx(2.3 / 3)
    unanswered = served_row(Cell((MODEL,), MOSEL), results_of(records[3:]))
    assert (unanswered.violations, unanswered.met, unanswered.answered_rps) == (1.0, 0.0, 0.0)
    assert np.isnan([unanswered.mean_seconds, unanswered.accuracy]).all()


def test_interval_counts_no_more_rows_than_were_drawn():
    few, many = (measured_accuracy(results_of([a_record()] * n)) for n in (1000, 100_000))

    assert few[0] == many[0] == 0.75
    assert few == many


def test_speed_is_the_median_of_batches_over_the_profile():
    point = a_point_profile("late", 0.01, 0.001)
    records = [
        a_record(
            visits={"name": StageVisit("late", size, 0.03, times * (1 + 0.001 * n) * point.latency_seconds(size, 0.5))}
        )
        for n in range(20)
        for size, times in ((4, 2.0), (8, 1.9), (16, 5.0))
        for _ in range(2)
    ]

    assert service_ratio(results_of(records), point) == pytest.approx(2.0, rel=0.03)
    with pytest.raises(ValueError, match="none of 1 jobs"):
        service_ratio(results_of([a_record(RequestOutcome.DROPPED)]), point)


@pytest.mark.parametrize("first", [40.0, 100.0, 180.0])
async def test_maximum_load_is_found_from_above_and_below(first):
    async def holds(rate):
        return rate <= 101.0

    assert 101.0 - first / 8 < await serving.search_goodput(holds, first) <= 101.0


def a_row(method, factor, violations, met):
    return JobRow(Cell((MODEL,), method, factor), 100, violations, met, 0.8, 50 * factor, 0.2, 0.0, 0.0)


def a_comparison(ours=0.0, theirs=0.1, lost=0):
    runs = [
        (a_row(method, factor, share, 1 - share), results_of([a_record()]))
        for factor in (0.5, 1.0)
        for method in METHODS
        for share in (ours if method == OURS else theirs,)
    ]
    return Comparison(runs, "made up", 120.0, 1.2, 0.25, True, "synthesised voices", lost)


def test_thresholds_compare_ours_with_mosel():
    report, worse = Report("reproduce-mosel"), Report("reproduce-mosel")
    judge(a_comparison(), report)
    judge(a_comparison(ours=0.2, lost=1), worse)

    assert [bar.holds for bar in report.bars] == [True] * 3
    assert not any(bar.holds for bar in worse.bars)
    assert report.figures["served_modalitymix_carried_rows_rps"] == 50.0
    assert report.figures["served_mosel_carried_rows_rps"] == pytest.approx(2.5)


def test_page_shows_every_served_policy():
    page = Page("MOSEL's evaluation", "served", "")
    add_sections(page, a_comparison(lost=2))
    html = page.render()

    assert all(method in html for method in METHODS)
    assert "In 2 of these loads a router was lost" in html
    assert [row[1] for row in table_rows(a_comparison())] == [*METHODS, *METHODS]
    assert {len(row) for row in table_rows(a_comparison())} == {len(COLUMNS)}


@pytest.mark.parametrize("method", [OURS, MOSEL, PLAIN])
def test_only_our_plan_has_escalations(tmp_path, method):
    pipeline = write_pipeline(SOURCE, tmp_path, schedulingPolicy=method)
    names = [point.name for point in pipeline.spec.stage("name").variant("late").points]
    points = [
        a_point_profile("late", 0.002, 0.0005 / (1 + index)).replace(operating_point=name)
        for index, name in enumerate(names)
    ]
    (stage,) = plan_load(method, pipeline, {"name": a_profile("name", points)}, 10.0, 5.0).spec.stages

    assert len(stage.points) == len(names)
    assert any(point.escalations for point in stage.points) == (method == OURS)


def test_slower_machine_takes_longer_for_every_batch():
    profile = a_profile("name", [a_point_profile("late", 0.01, 0.001)])
    slow, fast = slow_down({"name": profile}, 2.0)["name"].spec.points[0], profile.spec.points[0]

    assert [m.latency_seconds_mean for m in slow.measurements] == pytest.approx(
        [2 * m.latency_seconds_mean for m in fast.measurements]
    )
    assert slow.fit.seconds(8) == pytest.approx(2 * fast.fit.seconds(8))
    assert slow.measurements[0].throughput_rps == pytest.approx(fast.measurements[0].throughput_rps / 2)


@pytest.mark.parametrize("has_cgroups", [False, True])
def test_machine_that_limits_no_cores_leaves_no_group(has_cgroups, tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(path)

    if has_cgroups:
        (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(serving, "CGROUPS", tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    with limit_cores(1, 0.5) as is_limited:
        assert not is_limited
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"] * has_cgroups


def test_loads_are_numbers_above_zero():
    assert parse_loads("2,0.5,1") == (0.5, 1.0, 2.0)
    for wrong in ("", "0", "1,-2", "much", "inf", "nan"):
        with pytest.raises(ArgumentTypeError, match="write numbers above 0"):
            parse_loads(wrong)


def test_missing_recordings_are_reported_before_simulating(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(SpawnContext, "Process", lambda *_, **__: pytest.fail("cells are simulated"))
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--recordings", str(tmp_path / "none")]

    assert run_benchmark(["reproduce-mosel", "--served", *folders]) == 1
    assert f"{tmp_path / 'none'}" in capsys.readouterr().err
