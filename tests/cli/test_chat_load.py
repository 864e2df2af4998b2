"""Load of a chat pipeline: streamed responses, and token latencies by modality."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.builders import a_pipeline, a_plan
from tests.cli.runs import BEGAN, a_run, a_sample
from trimtab.commands import status
from trimtab.load_options import default_client
from trimtab.local.counters import Counters, chat_stats
from trimtab.remote_recorder import sum_counters
from trimtab.report.summary import summary_items
from trimtab.run_samples import SampleWindow
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.results import Record, Results, RunFacts
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Chunk
from trimtab_router.execution.response_metadata import StreamTiming
from trimtab_router.observability.metrics import TokenMetrics

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
