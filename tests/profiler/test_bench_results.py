"""Profiles from results of `vllm bench serve` and other load generators."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.chats import a_chat_pipeline
from tests.router.engines import an_engine_pipeline
from trimtab_pipelines.documents import DocumentError
from trimtab_profiler.bench_results import bench_profiles

RESULT: dict[str, Any] = {
    "backend": "openai-chat",
    "max_concurrency": 4,
    "completed": 40,
    "failed": 0,
    "duration": 8.0,
    "request_throughput": 5.0,
    "total_input_tokens": 4000,
    "total_output_tokens": 840,
    "mean_ttft_ms": 100.0,
    "median_ttft_ms": 90.0,
    "p99_ttft_ms": 200.0,
    "mean_tpot_ms": 10.0,
    "median_tpot_ms": 9.0,
    "p99_tpot_ms": 20.0,
}


def a_result(folder: Path, **changes: Any) -> Path:
    path = folder / f"{changes.get('max_concurrency', 4)}-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(RESULT | changes))
    return path


def test_results_become_measurements_by_concurrency(tmp_path: Path) -> None:
    single = a_result(tmp_path, max_concurrency=1, request_throughput=2.0, mean_e2el_ms=250.0)
    profiles = bench_profiles(an_engine_pipeline(), [a_result(tmp_path), single])

    (point,) = profiles["text"].spec.points
    first, four = point.measurements
    assert (first.batch_size, first.latency_seconds_mean, first.throughput_rps, first.batches) == (1, 0.25, 2.0, 40)
    assert (four.batch_size, four.batches) == (4, 10)
    assert four.latency_seconds_mean == pytest.approx(0.1 + 20 * 0.01)
    assert four.latency_seconds_p99 == pytest.approx(0.2 + 20 * 0.02)
    assert point.chats is not None
    assert point.chats.time_to_first_token.measurements[1].latency_seconds_p50 == pytest.approx(0.09)
    assert (point.chats.tokens, point.chats.text_prompt_tokens) == (21.0, 100.0)


def _spread(mean: float) -> dict[str, Any]:
    return {"unit": "ms", "avg": mean, "p50": mean, "p99": 2 * mean}


AIPERF: dict[str, Any] = {
    "input_config": {"endpoint": {"streaming": True}, "loadgen": {"concurrency": 4}},
    "request_count": {"unit": "requests", "avg": 40.0},
    "error_request_count": None,
    "request_throughput": {"unit": "requests/sec", "avg": 5.0},
    "input_sequence_length": {"avg": 100.0},
    "output_sequence_length": {"avg": 21.0},
    "time_to_first_token": _spread(100.0),
    "inter_token_latency": _spread(10.0),
    "request_latency": _spread(300.0),
}


def _successful(mean: float) -> dict[str, Any]:
    return {"successful": {"mean": mean, "median": mean, "percentiles": {"p99": 2 * mean}}}


GUIDELLM: dict[str, Any] = {
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 4}},
            "metrics": {
                "request_totals": {"successful": 40, "errored": 0},
                "requests_per_second": _successful(5.0),
                "prompt_token_count": _successful(100.0),
                "output_token_count": _successful(21.0),
                "time_to_first_token_ms": _successful(100.0),
                "inter_token_latency_ms": _successful(10.0),
                "request_latency": _successful(0.3),
            },
        }
    ]
}


@pytest.mark.parametrize("result", [AIPERF, GUIDELLM], ids=["AIPerf", "GuideLLM"])
def test_results_of_other_generators_are_read(tmp_path: Path, result: dict[str, Any]) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    (point,) = bench_profiles(an_engine_pipeline(), [file])["text"].spec.points

    (measured,) = point.measurements
    assert (measured.batch_size, measured.throughput_rps, measured.batches) == (4, 5.0, 10)
    assert measured.latency_seconds_mean == pytest.approx(0.3)
    assert measured.latency_seconds_p99 == pytest.approx(0.6)
    assert point.chats is not None
    assert point.chats.time_to_first_token.measurements[0].latency_seconds_mean == pytest.approx(0.1)
    assert (point.chats.tokens, point.chats.text_prompt_tokens) == (21.0, 100.0)


def test_estimates_are_marked_and_have_a_margin(tmp_path: Path) -> None:
    file = tmp_path / "best_config_topn.csv"
    rows = ["m,100,21,4,100.0,10.0,tp1", "m,100,21,8,150.0,15.0,tp1", "m,100,21,16,10.0,1.0,tp4"]
    file.write_text("\n".join(["model,isl,osl,concurrency,ttft,tpot,parallel", *rows]))
    profile = bench_profiles(an_engine_pipeline(), [file])["text"]

    assert profile.metadata.annotations == {"trimtab.dev/estimated": "AIConfigurator, times 1.2"}
    four, eight = profile.spec.points[0].measurements
    assert (four.batch_size, eight.batch_size) == (4, 8)
    assert four.latency_seconds_mean == pytest.approx(0.36)
    assert four.throughput_rps == pytest.approx(4 / 0.36)


@pytest.mark.parametrize("text", ["{", "7", '{"benchmarks": [{}]}', "model,isl\nm,1\n"])
def test_unknown_result_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(
        DocumentError, match=r"^[^\n]*no result of vllm bench serve, AIPerf, GuideLLM or AIConfigurator"
    ):
        bench_profiles(an_engine_pipeline(), [file])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_concurrency": None}, "max_concurrency: .*; give results of vllm bench serve with --max-concurrency"),
        ({"failed": 3}, "3 requests failed"),
        ({"completed": 0}, "completed"),
    ],
)
def test_unusable_result_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        bench_profiles(an_engine_pipeline(), [a_result(tmp_path, **changes)])


def test_equal_concurrencies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="another result has max_concurrency 4"):
        bench_profiles(an_engine_pipeline(), [a_result(tmp_path), a_result(tmp_path)])


def test_pipeline_without_an_engine_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="0 variants with an engine"):
        bench_profiles(a_chat_pipeline(), [a_result(tmp_path)])
