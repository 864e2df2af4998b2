"""Results of AIPerf and GuideLLM, and estimates of AIConfigurator, in the fields of `vllm bench serve`."""

import csv
import json
from collections.abc import Iterator, Mapping
from typing import Any

ESTIMATE_MARGIN = 1.2
"""Factor by which estimated times are planned longer, until they are measured."""
_CSV_START = "model,"
_GROUP = ("backend", "system", "parallel", "tp", "pp", "dp")
"""Columns that are equal in the estimates of one configuration."""


def is_estimate(text: str) -> bool:
    return text.startswith(_CSV_START)


def read_records(text: str) -> list[dict[str, Any]]:
    """Records by concurrency. Raises ValueError, KeyError, TypeError or AttributeError for an unknown format."""
    if is_estimate(text):
        return list(_aiconfigurator(text))
    document = json.loads(text)
    if "benchmarks" in document:
        return [_guidellm(benchmark) for benchmark in document["benchmarks"]]
    return [_aiperf(document) if "request_throughput" in document and "input_config" in document else document]


def _aiperf(document: Mapping[str, Any]) -> dict[str, Any]:
    """`profile_export_aiperf.json`: times in milliseconds."""
    requests = document["request_count"]["avg"]
    failed = (document.get("error_request_count") or {}).get("avg", 0)
    tokens = {
        f"total_{name}_tokens": document[f"{name}_sequence_length"]["avg"] * requests for name in ("input", "output")
    }
    return {
        "max_concurrency": _concurrency(document["input_config"]),
        "completed": int(requests),
        "failed": int(failed),
        "request_throughput": document["request_throughput"]["avg"],
        **{name: round(value) for name, value in tokens.items()},
        **_times("ttft", document["time_to_first_token"], "avg", "p50", "p99"),
        **_times("tpot", document["inter_token_latency"], "avg", "p50", "p99"),
        **_times("e2el", document["request_latency"], "avg", "p50", "p99"),
    }


def _guidellm(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """One benchmark of `benchmarks.json`: latencies of requests in seconds, others in milliseconds."""
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]

    def figures(name: str, factor: float = 1.0) -> dict[str, float]:
        found = metrics[name]["successful"]
        values = {"mean": found["mean"], "median": found["median"], "p99": found["percentiles"]["p99"]}
        return {figure: value * factor for figure, value in values.items()}

    requests = totals["successful"]
    names = ("mean", "median", "p99")
    return {
        "max_concurrency": (benchmark.get("config") or benchmark["args"])["strategy"]["streams"],
        "completed": requests,
        "failed": totals["errored"],
        "request_throughput": figures("requests_per_second")["mean"],
        "total_input_tokens": round(figures("prompt_token_count")["mean"] * requests),
        "total_output_tokens": round(figures("output_token_count")["mean"] * requests),
        **_times("ttft", figures("time_to_first_token_ms"), *names),
        **_times("tpot", figures("inter_token_latency_ms"), *names),
        **_times("e2el", figures("request_latency", 1000.0), *names),
    }


def _aiconfigurator(text: str) -> Iterator[dict[str, Any]]:
    """`best_config_topn.csv`: the rows that have the configuration of the first, with a margin."""
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows:
        if any(row.get(name) != rows[0].get(name) for name in _GROUP):
            continue
        first, between, inputs, outputs = (float(row[name]) for name in ("ttft", "tpot", "isl", "osl"))
        concurrency = round(float(row["concurrency"]))
        seconds = ESTIMATE_MARGIN * (first + between * max(outputs - 1, 0)) / 1000
        times = {f"{figure}_ttft_ms": ESTIMATE_MARGIN * first for figure in ("mean", "median", "p99")}
        times |= {f"{figure}_tpot_ms": ESTIMATE_MARGIN * between for figure in ("mean", "median", "p99")}
        yield {
            "max_concurrency": concurrency,
            "completed": 1,
            "request_throughput": concurrency / seconds,
            "total_input_tokens": round(inputs),
            "total_output_tokens": round(outputs),
            **times,
        }


def _times(name: str, values: Mapping[str, float], mean: str, median: str, p99: str) -> dict[str, float]:
    return {f"mean_{name}_ms": values[mean], f"median_{name}_ms": values[median], f"p99_{name}_ms": values[p99]}


def _concurrency(config: object) -> int | None:
    """The concurrency of AIPerf's configuration, whose sections differ between its versions."""
    if isinstance(config, Mapping):
        own = config.get("concurrency")
        return own if isinstance(own, int) else next(filter(None, map(_concurrency, config.values())), None)
    if isinstance(config, list):
        return next(filter(None, map(_concurrency, config)), None)
    return None
