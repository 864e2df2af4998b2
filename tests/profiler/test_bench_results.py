"""Profiles from results of `vllm bench serve`."""

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
    with pytest.raises(DocumentError, match="another file has max_concurrency 4"):
        bench_profiles(an_engine_pipeline(), [a_result(tmp_path), a_result(tmp_path)])


def test_pipeline_without_an_engine_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="0 variants with an engine"):
        bench_profiles(a_chat_pipeline(), [a_result(tmp_path)])
