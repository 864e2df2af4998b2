"""Report: content, and a single file without external resources."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.cli.runs import SECONDS, a_run, a_sample
from trimtab import run_record
from trimtab.commands.compare import comparison_result
from trimtab.commands.demo import demo_result
from trimtab.report import charts, series
from trimtab.report.page import render
from trimtab.report.summary import summary_items
from trimtab.report.summary_stats import run_stats
from trimtab.run_samples import SampleWindow
from trimtab_pipelines.documents import DocumentError

LATE, DROPPED = 60, 12


class Page(HTMLParser):
    """Parser that collects what a browser would fetch, and the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "action", "data", "poster"}]
        if tag in {"link", "iframe", "img", "object", "embed"}:
            self.fetched.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    parsed = Page()
    parsed.feed(render([a_run()]))
    return parsed


def test_report_loads_no_external_resource(page: Page) -> None:
    assert page.fetched == []
    style = re.search(r"<style>(.*?)</style>", render([a_run()]), re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style[1])


def test_report_shows_outcomes_changes_and_faults(page: Page) -> None:
    """Summary, stages, reasons, changes and faults; user text is escaped."""
    words = " ".join(page.words)
    for said in (
        "1,200",
        "= 1128 ok + 60 late + 12 dropped + 0 refused + 0 failed",
        "94.00 %",
        "Stage first",
        "Stage second",
        "dropped in second: DeadlineUnreachable",
        "answered late",
        "to slow <because>",
        "replica first-0 ended",
        "last line: <nothing>",
        "first: slow ×1 batch 8",
    ):
        assert said in words


def test_report_compares_runs() -> None:
    page = render([a_run("adaptive"), a_run("static-lightest")])
    assert page.count("<td class='text'>static-lightest</td>") == 1


def test_report_renders_without_results_or_samples() -> None:
    empty = a_run(with_load=False)
    for run in (empty, type(empty)(title="nothing", pipeline=empty.pipeline, samples=[], plans=[])):
        assert "<title>" in render([run])


def test_stats_of_a_load() -> None:
    figures = run_stats(a_run())
    assert figures.received == SECONDS * 10
    assert figures.outcomes == {
        "ok": 1200 - LATE - DROPPED,
        "late": LATE,
        "dropped": DROPPED,
        "refused": 0,
        "failed": 0,
    }
    assert figures.accounted
    assert figures.slo_fraction == pytest.approx((1200 - LATE - DROPPED) / 1200)
    assert figures.measured_accuracy == pytest.approx(1 - SECONDS / (1200 - DROPPED))
    assert figures.expected_accuracy == pytest.approx(0.88)
    assert figures.p99_seconds == pytest.approx(2.5, rel=0.01)
    assert figures.mean_cores == pytest.approx(1.25, abs=0.01)
    assert figures.max_cores == 1.5
    assert (figures.plan_changes, figures.variant_changes) == (2, {"first": 2, "second": 0})
    assert (figures.load_low_rps, figures.load_high_rps) == (10, 10)


def test_stats_without_a_load_use_router_counters() -> None:
    figures = run_stats(a_run(with_load=False))
    assert figures.received == 1200
    assert figures.expected_accuracy == pytest.approx(0.88)
    assert np.isnan(figures.measured_accuracy)
    assert (figures.p50_seconds, figures.p99_seconds) == (0.5, 2.0)


def test_variant_spans_end_at_each_change() -> None:
    found = series.variant_spans(a_run(), "first")
    assert [(s.start, s.end, s.stage.variant, s.stage.ready_replicas) for s in found] == [
        (0, 40, "fast", 1),
        (40, 60, "slow", 1),
        (60, 80, "slow", 2),
        (80, 120, "fast", 2),
    ]


def test_lost_requests_have_reason_and_time() -> None:
    lost = series.lost_requests(a_run())
    assert {reason: curve.value.sum() for reason, curve in lost.items()} == {
        "answered late": LATE,
        "dropped in second: DeadlineUnreachable": DROPPED,
    }
    assert lost["answered late"].value[:30].sum() == 0


def test_summary_items_state_whether_targets_hold() -> None:
    shown = {card.label: card.holds for card in summary_items(a_run())}
    assert shown["requests received"] is True
    assert shown["within the SLO"] is False
    assert shown["p99 latency"] is None


def test_summary_items_show_queue_and_service_time() -> None:
    shown = {card.label: (card.value, card.detail) for card in summary_items(a_run()) if card.label.startswith("stage")}
    detail = "queue + service time, median; p99 20 ms + 50 ms; 3.0 rows per batch"
    assert shown == {"stage first": ("20 ms + 50 ms", detail)}


def test_window_holds_the_last_seconds() -> None:
    window = SampleWindow()
    for sample in a_run().samples:
        window.add(sample)
    assert len(window.samples) == 11
    assert window.rps == pytest.approx(10)
    assert (window.latency_seconds(0.4), window.latency_seconds(0.99)) == (0.5, 2.0)


def test_record_round_trip(tmp_path: Path) -> None:
    run = a_run()
    run_record.save(run, tmp_path)
    again = run_record.load(tmp_path)
    assert again.samples == run.samples
    assert list(again.plans) == list(run.plans)
    assert list(again.faults) == list(run.faults)
    assert run_stats(again) == run_stats(run)


def test_run_without_samples_can_be_loaded(tmp_path: Path) -> None:
    run_record.Recorder(tmp_path, "short", a_run().pipeline).start(None)
    again = run_record.load(tmp_path)
    assert (again.title, list(again.samples)) == ("short", [])


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"holds no recorded run: .*run\.json: No such file"):
        run_record.load(tmp_path)
    run_record.save(a_run(), tmp_path)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(DocumentError, match="sample"):
        run_record.load(tmp_path)


def test_demo_result_needs_adaptation() -> None:
    outcome = demo_result(run_stats(a_run()))
    assert {b.bar: b.holds for b in outcome.bars} == {
        "failed requests": True,
        "received - ok - late - dropped - refused - failed": True,
        "|measured - expected| accuracy": True,
        "fewest variant changes of a stage": False,
        "maximum load / minimum load": False,
    }


def test_comparison_without_gain_fails() -> None:
    """The share of equal runs is NaN, which does not hold."""
    figures = run_stats(a_run())
    held = {b.bar: b.holds for b in comparison_result(figures, figures, figures).bars}
    assert held["share of the accuracy between lightest and heaviest"] is False
    assert held["adaptive: fraction within the SLO"] is False


def test_constant_accuracy_is_drawn_flat() -> None:
    """Rounding errors of sums are not magnified."""
    samples = []
    for second in range(60):
        counters = replace(a_sample(second).counters, accuracy_sum=sum([0.9017] * second), accuracy_count=second)
        samples.append(replace(a_sample(second), counters=counters))
    run = replace(a_run(), samples=samples, results=None)
    expected, _ = series.accuracies(run)
    assert set(expected.value[~np.isnan(expected.value)]) == {0.9017}
    low, high = charts.accuracy_chart(run).layout.yaxis.range
    assert high - low >= 0.04
