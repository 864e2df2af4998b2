"""Reports of runs, also of chats: content, figures, and a single file without external resources."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.builders import a_pipeline, a_plan
from tests.cli.runs import BEGAN, SECONDS, a_run, a_sample
from trimtab import run_record
from trimtab.commands import status
from trimtab.commands.compare import ADAPTIVE, CHEAPEST, HEAVIEST, LIGHTEST, SINGLE, comparison_result
from trimtab.commands.demo import demo_result
from trimtab.load_options import default_client
from trimtab.local.counters import Counters, chat_stats
from trimtab.remote_recorder import sum_counters
from trimtab.report import charts, series
from trimtab.report.page import render
from trimtab.report.summary import summary_items
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_samples import SampleWindow
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Chunk
from trimtab_router.execution.response_metadata import StreamTiming
from trimtab_router.observability.metrics import Metrics, TokenMetrics

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
    idle = ("no rows", "no request reached it; send --samples that do")
    assert shown == {"stage first": ("20 ms + 50 ms", detail), "stage second": idle}


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
    outcome = demo_result(replace(run_stats(a_run()), plan_changes=1))
    assert {b.bar: b.holds for b in outcome.bars} == {
        "failed requests": True,
        "received - ok - late - dropped - refused - failed": True,
        "|measured - expected| accuracy": True,
        "plan changes": False,
        "maximum load / minimum load": False,
    }


def test_comparison_without_gain_fails() -> None:
    stats = run_stats(a_run())
    held = bars_of_comparison(stats, stats)
    assert held["share of the accuracy between lightest and heaviest"] is False
    assert held["adaptive: fraction within the SLO"] is False
    assert held["cheapest: mean cores / those of the best single variants"] is False


def bars_of_comparison(single: RunStats, ours: RunStats) -> dict[str, bool]:
    stats = {ADAPTIVE: ours, SINGLE: single, CHEAPEST: ours, LIGHTEST: single, HEAVIEST: single}
    return {bar.bar: bar.holds for bar in comparison_result(stats).bars}


@pytest.mark.parametrize(
    ("gained", "cores_share", "holds"),
    [
        (0.02, 1.0, True),
        (0.02, 1.01, False),
        (0.01, 0.5, True),
        (0.01, 0.66, False),
        (-0.0029, 0.65, True),
        (-0.0031, 0.5, False),
        (0.0, 0.66, False),
    ],
)
def test_gain_is_accuracy_or_cores(gained: float, cores_share: float, holds: bool) -> None:  # noqa: FBT001
    single = run_stats(a_run())
    accuracy, cores = single.measured_accuracy + gained, single.mean_cores * cores_share
    held = bars_of_comparison(single, replace(single, measured_accuracy=accuracy, mean_cores=cores))
    assert all(fits for bar, fits in held.items() if "single variants" in bar) is holds
    assert "adaptive: fraction late, dropped or refused" in held


def test_gain_of_the_cheapest_plans_is_enough() -> None:
    single = run_stats(a_run())
    cheapest = replace(single, measured_accuracy=single.measured_accuracy + 0.02, mean_cores=0.7 * single.mean_cores)
    stats = {ADAPTIVE: single, SINGLE: single, CHEAPEST: cheapest, LIGHTEST: single, HEAVIEST: single}
    assert all(bar.holds for bar in comparison_result(stats).bars if "single variants" in bar.bar)


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


PIPELINES = Path(__file__).parents[2] / "pipelines"
SLO = ServiceLevel.model_validate({"latency": "2s", "timeToFirstToken": "500ms", "timePerOutputToken": "100ms"})


def counted(*answers: tuple[int, list[float]]) -> Counters:
    """Counters of a router after responses: (images, times of their tokens in seconds)."""
    registry = CollectorRegistry()
    metrics = TokenMetrics(registry, ("here", "mine"), SLO)
    for images, moments in answers:
        delivery = StreamTiming(0.0, images)
        for moment in moments:
            delivery.record(0, Chunk("a", 1), moment)
        metrics.observe_stream(delivery, images)
    return Counters.parse(generate_latest(registry).decode())


def streamed(
    seconds: float, between: float, images: int, outcome: RequestOutcome = RequestOutcome.OK, code: str = "200"
) -> Record:
    return Record(
        1.0, 1.0, 1.2, outcome, code, first_token_seconds=seconds, between_tokens_seconds=between, images=images
    )


def a_run_of_chats():
    """Two text-only chats, one late, and two with images: one answered, one refused."""
    facts = RunFacts("sample", "constant:1", 120.0, 2.0, ("answer",), BEGAN, streamed=True)
    nan = float("nan")
    records = [
        streamed(0.05, 0.01, 0),
        streamed(0.7, 0.02, 0, RequestOutcome.LATE),
        streamed(0.2, 0.03, 3),
        streamed(nan, nan, 1, RequestOutcome.REFUSED, "429"),
    ]
    pipeline = load_pipeline(PIPELINES / "lmm-digits")
    return replace(a_run(), pipeline=pipeline, plans=[a_plan(pipeline)], results=Results.of(facts, records))


def test_default_client_streams_chats():
    assert default_client(load_pipeline(PIPELINES / "lmm-digits"), None) == "chat"
    assert default_client(load_pipeline(PIPELINES / "lmm-digits" / "planned.yaml"), None) == "chat"
    assert default_client(a_pipeline(), None) == "REST"


def test_chat_pipeline_without_payloads_needs_samples():
    pipeline = load_pipeline(PIPELINES / "llava-onevision")

    with pytest.raises(LoadError, match=r"llava-onevision serves chats.*trimtab\.dev/payloads.*--samples"):
        default_client(pipeline, None)
    assert default_client(pipeline, "mine:Chats") == "chat"


def test_counters_have_token_times_by_modality():
    counters = counted((0, [0.04, 0.049]), (0, [0.4, 0.48]), (2, [0.8, 0.809, 0.85]))
    text, image = (chat_stats(counters, modality) for modality in ("text", "image"))

    assert (text.answered, text.first_token_p50_seconds, text.first_token_p99_seconds) == (2, 0.05, 0.5)
    assert (text.next_token_p50_seconds, text.next_token_p99_seconds) == (0.01, 0.1)
    assert (image.answered, image.first_token_p99_seconds, image.next_token_p99_seconds) == (1, 1.0, 0.05)
    assert counted().first_token_buckets == {}


def test_token_times_of_routers_are_summed():
    one, two = counted((0, [0.04, 0.049])), counted((0, [0.4, 0.48]), (2, [0.8]))
    both, window = sum_counters([one, two]), SampleWindow()
    assert {name: chat_stats(both, name).answered for name in both.first_token_buckets} == {"text": 2, "image": 1}

    window.add(replace(a_sample(1), counters=one))
    window.add(replace(a_sample(2), counters=both))
    assert window.first_token_seconds("text", 0.5) == 0.5
    assert window.next_token_seconds("text", 0.5) == 0.1
    assert window.next_token_seconds("image", 0.5) is None


def test_status_prints_token_times_of_chats(capsys):
    counters = replace(counted((0, [0.04, 0.049]), (2, [0.8])), received=9, outcomes={"ok": 2, "dropped": 2})

    status.print_status(RouterState(ready=True, stages={}), replace(counters, client_errors=1))
    output = " ".join(capsys.readouterr().out.split())
    assert "within the SLO 66.67 %" in output
    first = "time to first token p50 ≤"
    assert f"text-only chats: 1 answered, {first} 50 ms, p99 ≤ 50 ms; between tokens p50 ≤ 10 ms" in output
    assert f"chats with images: 1 answered, {first} 1000 ms, p99 ≤ 1000 ms; between tokens p50 ≤ –" in output


def test_summary_has_token_times_by_modality():
    shown = {card.label: card for card in summary_items(a_run_of_chats())}

    assert shown["within the SLO"].value == "50.00 %"
    assert "500 ms to the first token, 100 ms between tokens" in shown["within the SLO"].detail
    assert shown["unanswered requests"].value == "1"
    assert shown["unanswered requests"].detail == "1× refused: 429"
    text, image = (shown[f"p99 time to first token, {label}"] for label in ("text-only chats", "chats with images"))
    assert (text.value, text.holds) == ("700 ms", False)
    assert text.detail == "median 50 ms, SLO 500 ms; 2 answered, 50.00 % within the SLO"
    assert (image.value, image.holds, image.detail.endswith("; 1 answered, 50.00 % within the SLO")) == (
        "200 ms",
        True,
        True,
    )
    assert shown["p99 time between tokens, chats with images"].value == "30 ms"
    assert "p99 time to first token, chats with images" not in {card.label for card in summary_items(a_run())}


def test_load_summary_has_figures_by_modality():
    summary = a_run_of_chats().results.summary()

    assert (summary["text_received"], summary["text_slo_fraction"]) == (2, 0.5)
    assert summary["image_first_token_seconds_p99"] == pytest.approx(0.2, rel=0.01)


def a_run_of_cascades():
    """Ten rows a second of `fast`, of which two are served again by `slow`; the plan expects one."""
    run = a_run()
    shares = [{"variant": "fast", "share": 0.9}, {"variant": "slow", "share": 0.1, "escalated": True}]
    seconds: dict[str, Any] = {
        "upgrades": [{"name": "default", "variant": "slow", "accuracy": 0.9, "serviceSeconds": {8: 0.8}}]
    }
    seconds |= {"serviceSeconds": {8: 0.08}, "batchSize": 8, "shares": shares}
    plan = run.plans[0].model_dump()
    first, *others = plan["spec"]["stages"]
    plan["spec"]["stages"] = [first | seconds, *others]
    samples = []
    for sample in run.samples:
        rows = 10.0 * (sample.at - BEGAN)
        served = {"first": {"fast/default": rows, "slow/default": 0.2 * rows}}
        escalated = {"first": {"fast/default slow/default": 0.2 * rows}}
        samples.append(replace(sample, counters=replace(sample.counters, served_rows=served, escalated_rows=escalated)))
    return replace(run, samples=samples, plans=[type(run.plans[0]).model_validate(plan)])


def test_report_shows_expected_and_measured_shares():
    run = a_run_of_cascades()
    chart = charts.rows_chart(run, "first")
    card = next(item for item in summary_items(run) if item.label == "escalation rate, stage first")

    assert chart is not None
    assert {trace.name: trace.y[0] for trace in chart.data} == pytest.approx(
        {"fast": 0.8, "expected": 0.9, "escalated to slow": 0.2}
    )
    assert charts.rows_chart(run, "second") is None
    assert (card.value, card.detail.split("; ")) == (
        "20.00 %",
        [
            "expected 10.00 %",
            "80 % fast, 20 % escalated to slow",
            "expected 90 % fast, 10 % escalated to slow",
            "84 replica-seconds less than slow alone",
        ],
    )


def test_status_prints_expected_and_measured_shares(capsys):
    light, heavy = {"variant": "s", "operating_point": "default"}, {"variant": "l", "operating_point": "default"}
    rows = [light | {"rows": 80.0}, heavy | {"rows": 20.0, "escalated": True}]
    stage = {"expected_shares": [light | {"rows": 0.9}, heavy | {"rows": 0.1, "escalated": True}], "recent_rows": rows}
    status.print_status(RouterState.model_validate({"stages": {"read": stage, "other": {}}}), Counters())

    output = " ".join(capsys.readouterr().out.split())
    measured = "last minute 80 % s, 20 % escalated to l, escalation rate 20.0%"
    assert f"read: {measured}; expected 90 % s, 10 % escalated to l" in output


def test_counters_have_rows_by_stage_and_point():
    metrics = Metrics("a", "p", ServiceLevel(latency_seconds=1.0))
    stats = metrics.stage("read")
    stats.observe_batch(("s", "all"), 6, 0.02, 1.0)
    stats.count_escalated_rows(("s", "all"), ("l", "all"), 2)
    counters = Counters.parse(b"".join(metrics.exposition()).decode())

    assert (counters.served_rows, counters.escalated_rows) == ({"read": {"s/all": 6.0}}, {"read": {"s/all l/all": 2.0}})
    assert sum_counters([counters, counters]).escalated_rows == {"read": {"s/all l/all": 4.0}}
