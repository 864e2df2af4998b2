"""Dashboards and alerts: complete panels, existing metrics, and each expression evaluated by a real Prometheus."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from tests.charts.expressions import (
    CHART,
    alert_expressions,
    all_expressions,
    dashboard_expressions,
    evaluate,
    filled_in,
    without_threshold,
)
from tests.charts.helm import VALUES
from tests.control_plane import prometheus as a_prometheus
from tests.control_plane import tool
from trimtab_model_servers.server.chat_metrics import exposition
from trimtab_pipelines.request_outcome import ErrorCode, RequestOutcome, is_client_error
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.observability.metrics import Metrics

METRIC = re.compile(r"\btrimtab_[a-z0-9_]+")
SAMPLE = re.compile(r"^([^#\n].*)$", re.MULTILINE)
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
# What adapter and operator expose, in Prometheus' text format.
CONTROL = """
trimtab_observed_load_rps{namespace="a",pipeline="p"} 9
trimtab_forecast_load_rps{namespace="a",pipeline="p",source="lstm"} 10
trimtab_planned_generation{namespace="a",pipeline="p"} 3
trimtab_planned_accuracy{namespace="a",pipeline="p"} 0.9
trimtab_planned_latency_seconds{namespace="a",pipeline="p"} 0.2
trimtab_planned_cores{namespace="a",pipeline="p"} 2
trimtab_cost_per_hour{namespace="a",pipeline="p",flavor="l4"} 3.5
trimtab_planned_replicas{namespace="a",pipeline="p",stage="read",variant="read-l"} 2
trimtab_planned_batch_size_rows{namespace="a",pipeline="p",stage="read",variant="read-l"} 8
trimtab_planned_row_share{namespace="a",pipeline="p",stage="read",variant="l",operating_point="all",escalated="false"} 1
trimtab_plan_feasible{namespace="a",pipeline="p"} 1
trimtab_budget_cores{namespace="a",pipeline="p"} 4
trimtab_budget_cost_per_hour{namespace="a",pipeline="p"} 4
trimtab_slo_seconds{namespace="a",pipeline="p"} 0.4
trimtab_solve_seconds_bucket{namespace="a",pipeline="p",le="0.1"} 5
trimtab_solve_seconds_bucket{namespace="a",pipeline="p",le="+Inf"} 5
trimtab_decisions_total{namespace="a",pipeline="p",outcome="changed"} 2
trimtab_plan_changed_timestamp_seconds{namespace="a",pipeline="p"} 1700000000
trimtab_last_change_info{namespace="a",pipeline="p",change="read: l for m, since the load fell"} 1
trimtab_forecast_error_ratio{namespace="a",pipeline="p"} 0.1
trimtab_replicas{namespace="a",pipeline="p",stage="read",replica_group="shared",state="desired"} 2
trimtab_replicas{namespace="a",pipeline="p",stage="read",replica_group="shared",state="pending"} 0
trimtab_allocated_cores{namespace="a",pipeline="p"} 2
trimtab_allocated_devices{namespace="a",pipeline="p",flavor="l4"} 0
trimtab_condition{namespace="a",pipeline="p",type="Ready",status="True"} 1
trimtab_condition{namespace="a",pipeline="p",type="MetricsAvailable",status="True"} 1
trimtab_condition{namespace="a",pipeline="p",type="PlanApplied",status="True"} 1
DCGM_FI_DEV_GPU_UTIL{namespace="a",pod="p-read-0",gpu="0"} 40
DCGM_FI_DEV_FB_USED{exported_namespace="a",exported_pod="p-read-0",gpu="0"} 300
DCGM_FI_DEV_FB_FREE{exported_namespace="a",exported_pod="p-read-0",gpu="0"} 700
trimtab_reconcile_seconds_bucket{le="0.1"} 5
trimtab_reconcile_seconds_bucket{le="+Inf"} 5
trimtab_reconciles_total{outcome="done"} 5
"""
OF_THE_OPERATOR = {
    "trimtab_replicas",
    "trimtab_allocated_cores",
    "trimtab_allocated_devices",
    "trimtab_condition",
    "trimtab_reconcile_seconds",
    "trimtab_reconciles",
}
OF_THE_ADAPTER = {re.sub("_(total|bucket)$", "", name) for name in METRIC.findall(CONTROL)} - OF_THE_OPERATOR
MAY_BE_ABSENT = {"trimtab_api_writes_total", "trimtab_drops_total", "trimtab_refusals_total", "trimtab_retries_total"}
"""Not exposed in the test, so that expressions show what they return while nothing of the kind has happened."""


def router_text() -> str:
    """What a real router exposes once it has served a request."""
    metrics = Metrics("a", "p", ServiceLevel.model_validate({"latency": "400ms"}))
    metrics.received.inc()
    metrics.outcomes[RequestOutcome.OK].inc()
    metrics.latency.observe(0.05)
    metrics.accuracy.observe(0.9)
    metrics.plan_generation.set(3)
    metrics.requests_in_flight.set(2)
    metrics.concurrency_limit.set(64)
    metrics.record_certificate_expiration("proxy", time.time() + 90 * 86400)
    stage = metrics.stage("read")
    stage.watch(
        queue_rows=lambda: 2.0,
        ready_replicas=lambda: 1.0,
        drifted_points=float,
        output_drift=float,
        unauthenticated_replicas=float,
    )
    stage.record_ejection("read-0", "2 consecutive batches failed")
    stage.record_ejection_end("read-0")
    stage.observe_queue_seconds(0.01)
    stage.observe_batch(("read-l", "default"), 6, 0.02, 1.0)
    return b"".join(metrics.exposition()).decode()


class Talking:
    """A model that counts as one does that has chats: some of each so far, and more each time that it is asked."""

    def __init__(self) -> None:
        self._asked = 0

    def pending(self) -> dict[str, int]:
        fields = ["text_tokens", "image_tokens", "waiting", "running", "busy_slots", "slots"]
        fields += ["embedding_bytes", "stored_embeddings"]
        return dict.fromkeys(fields, 2)

    def totals(self) -> dict[str, float]:
        self._asked += 1
        fields = ("steps", "encoded_images", "encode_seconds", "fetched_bytes", "fetch_seconds")
        caches = ("cache_hits", "cache_misses", "cache_evictions")
        return dict.fromkeys((*fields, *caches), float(self._asked))

    async def close(self) -> None:
        """Nothing is open."""


TALKING = cast("Any", Talking())


def replica_text() -> str:
    """Metrics of a chat replica, with the labels of its pod that Prometheus adds."""
    exposed = exposition({"whole": TALKING}).decode()
    return re.sub(r"^(\w+)\{", r'\1{namespace="a",pipeline="p",stage="answer",', exposed, flags=re.MULTILINE)


class Exporter(BaseHTTPRequestHandler):
    """Serves one fixed page of metrics.

    Its samples have times of their own, so that a scrape that comes late ends no series: expressions are tested.
    """

    def do_GET(self) -> None:
        now = int(time.time() * 1000)
        page = SAMPLE.sub(rf"\g<1> {now}", router_text() + replica_text() + CONTROL).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Prometheus that has scraped the metrics a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{exporter.server_address[1]}"
    scrape = {"job_name": "trimtab", "scrape_interval": "250ms", "honor_labels": True}
    config = {"scrape_configs": [scrape | {"static_configs": [{"targets": [target]}]}], "rule_files": [alerts_file()]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    try:
        with a_prometheus(folder) as (address, process):
            wait_for_samples(address, process)
            yield address
    finally:
        exporter.shutdown()
        exporter.server_close()


def alerts_file() -> str:
    return str(CHART / "alerts.yaml")


def wait_for_samples(address: str, process: subprocess.Popen[bytes], seconds: float = 100) -> None:
    """Wait until a rate has two points."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, ValueError):
            if evaluate(address, "rate(trimtab_requests_received_total[5s])"):
                return
        time.sleep(0.1)
    raise AssertionError("Prometheus did not scrape")


def known_metrics() -> set[str]:
    names = set(METRIC.findall(router_text() + replica_text() + CONTROL))
    return names | {f"{name}_total" for name in MAY_BE_ABSENT} | MAY_BE_ABSENT


@pytest.mark.parametrize("path", BOARDS, ids=[path.stem for path in BOARDS])
def test_panels_have_descriptions(path: Path):
    board = json.loads(path.read_text())

    for panel in board["panels"]:
        assert panel["title"], panel["id"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "namespace", "pipeline"]


def test_every_metric_named_exists():
    used = {name for one in (*dashboard_expressions(), *alert_expressions()) for name in METRIC.findall(one.query)}

    assert used - known_metrics() == set()


@pytest.mark.parametrize("exposing", ["adapter/trimtab_adapter/metrics.py", "operator/trimtab_operator/metrics.py"])
def test_sample_metrics_match_adapter_and_operator(exposing: str):
    """Both build names from parts, so their own files are read for the part after the common prefix."""
    source = (CHART.parents[1] / exposing).read_text()
    others = {"adapter": OF_THE_OPERATOR, "operator": OF_THE_ADAPTER}[exposing.partition("/")[0]]
    names = {re.sub("_(total|bucket)$", "", name) for name in METRIC.findall(CONTROL)} - others

    assert {name for name in names if name.removeprefix("trimtab_") not in source} == set()


def test_expressions_return_data(prometheus: str):
    expressions = all_expressions("a", "p", "5s")

    assert len(expressions) > 50
    assert [e.title for e in expressions if not evaluate(prometheus, e.query)] == []


def test_expressions_return_nothing_for_an_unknown_pipeline(prometheus: str):
    expressions = [e for e in all_expressions("a", "absent", "5s") if e.where != "alerts"]

    assert any(not evaluate(prometheus, e.query) for e in expressions)


def series(query: str, text: str) -> set[tuple[str, str]]:
    """Code and reason of each series in a text that one of the selections of a query takes."""
    taken = set()
    for labels in re.findall(r"^trimtab_refusals_total\{(.*)\}", text, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        for selection in re.findall(r"trimtab_refusals_total\{([^}]*)\}", query):
            matchers = re.findall(r'(code|reason)([=!]~)"([^"]*)"', selection)
            if all(
                (re.fullmatch(allowed, found[name]) is not None) == (how == "=~") for name, how, allowed in matchers
            ):
                taken.add((found["code"], found["reason"]))
    return taken


def test_each_rejection_reason_is_on_exactly_one_panel():
    refused = {
        (code, reason)
        for code in ErrorCode
        for reason in ("ClientRateLimited", "ClientBytesLimited", "Overload", "Unauthenticated", "RouterUnavailable")
    }
    metrics = Metrics("a", "p", ServiceLevel.model_validate({"latency": "400ms"}))
    for code, reason in refused:
        metrics.count_refusal(code.name, reason)
    text = b"".join(metrics.exposition()).decode()
    panels = {one.title: series(one.query, text) for one in dashboard_expressions() if "refusals_total" in one.query}
    callers = panels["Client error refusals: {{code}} {{reason}}"]
    ours = panels["Server-side refusals and failures: {{code}} {{reason}}"]

    assert callers == {(code.name, reason) for code, reason in refused if is_client_error(code, reason)}
    assert ours == {(code.name, reason) for code, reason in refused} - callers


def test_alerts_do_not_fire_on_healthy_metrics(prometheus: str):
    assert [e.title for e in alert_expressions() if evaluate(prometheus, e.query)] == []


def assert_promtool_accepts(*arguments: str, folder: Path = VALUES) -> None:
    command = [tool("promtool"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_alerts():
    assert_promtool_accepts("check", "rules", alerts_file())


def test_alert_fires_on_its_condition():
    assert_promtool_accepts("test", "rules", "alerts.test.yaml")


@pytest.mark.parametrize(
    ("query", "watched"),
    [("max(a) == 0", "max(a)"), ("1 - a / b > 0.144\nand\nc > 0.1", "1 - a / b\nand\nc"), ("absent(a)", "(a)")],
)
def test_alert_query_without_threshold_keeps_its_metric(query: str, watched: str):
    assert without_threshold(query) == watched


POINT = 'namespace="a",pipeline="p",stage="read",variant="l"'


@pytest.mark.parametrize(
    ("title", "figures"),
    [
        (
            "Answers by variant: {{stage}} {{variant}} {{operating_point}}",
            {
                '{stage="read",variant="l",operating_point="all"}': 0.25,
                '{stage="read",variant="l",operating_point="sound"}': 0.75,
            },
        ),
        ("Escalation rate: {{stage}}", {'{stage="read"}': 0.25}),
        ("Escalation rate: {{stage}} expected", {'{stage="read"}': 0.1}),
        ("Unescalated responses: unescalated", {"{}": 0.0625}),
        ("Drifted accuracies: {{stage}}", {'{stage="read"}': 2}),
    ],
)
def test_operating_point_panels_show_shares_and_drifts(tmp_path: Path, title: str, figures: dict[str, float]):
    series = {
        f'trimtab_operating_point_rows_total{{{POINT},operating_point="all"}}': "0+60x30",
        f'trimtab_operating_point_rows_total{{{POINT},operating_point="sound"}}': "0+240x30",
        f'trimtab_escalated_rows_total{{{POINT},operating_point="sound",to_variant="l"}}': "0+60x30",
        f'trimtab_planned_row_share{{{POINT},operating_point="sound",escalated="false"}}': "0.9x30",
        f'trimtab_planned_row_share{{{POINT},operating_point="all",escalated="true"}}': "0.1x30",
        'trimtab_unescalated_responses_total{namespace="a",pipeline="p"}': "0+60x30",
        'trimtab_requests_total{namespace="a",pipeline="p",outcome="ok"}': "0+960x30",
        'trimtab_drifted_points{namespace="a",pipeline="p",stage="read"}': "2x30",
    }
    asked_of_one(tmp_path, title, series, figures)


CHAT = 'namespace="a",pipeline="p",modality="image"'


@pytest.mark.parametrize(
    ("title", "figures"),
    [
        ("Time to first token: p99 {{modality}}", {'{modality="image"}': 0.199, '{modality="text"}': 0.099}),
        ("Time between tokens: p50 {{modality}}", {'{modality="image"}': 0.015}),
        ("Tokens per second: {{modality}} {{direction}}", {'{modality="image",direction="out"}': 2}),
        ("Images per chat: mean", {"{}": 3}),
        ("Deduplicated images: {{stage}} {{source}}", {'{stage="see",source="cache"}': 0.5}),
        ("Cancelled rows: {{stage}}", {'{stage="say"}': 0.25}),
    ],
)
def test_chat_panels_show_latencies_tokens_and_images(tmp_path: Path, title: str, figures: dict[str, float]):
    series = {
        f'trimtab_ttft_seconds_bucket{{{CHAT},le="0.1"}}': "0x30",
        f'trimtab_ttft_seconds_bucket{{{CHAT},le="0.2"}}': "0+60x30",
        f'trimtab_ttft_seconds_bucket{{{CHAT},le="+Inf"}}': "0+60x30",
        f'trimtab_ttft_seconds_bucket{{{CHAT.replace("image", "text")},le="0.1"}}': "0+60x30",
        f'trimtab_ttft_seconds_bucket{{{CHAT.replace("image", "text")},le="+Inf"}}': "0+60x30",
        f'trimtab_tbt_seconds_bucket{{{CHAT},le="0.01"}}': "0x30",
        f'trimtab_tbt_seconds_bucket{{{CHAT},le="0.02"}}': "0+60x30",
        f'trimtab_tbt_seconds_bucket{{{CHAT},le="+Inf"}}': "0+60x30",
        f'trimtab_tokens_total{{{CHAT},direction="out"}}': "0+120x30",
        f"trimtab_images_per_request_sum{{{CHAT}}}": "0+180x30",
        f"trimtab_images_per_request_count{{{CHAT}}}": "0+60x30",
        f"trimtab_images_per_request_count{{{CHAT.replace('image', 'text')}}}": "0+60x30",
        'trimtab_encoder_dedup_total{namespace="a",pipeline="p",stage="see",source="cache"}': "0+30x30",
        'trimtab_cancelled_rows_total{namespace="a",pipeline="p",stage="say"}': "0+15x30",
    }
    asked_of_one(tmp_path, title, series, figures)


@pytest.mark.parametrize(
    "title", ["KV slots used: {{stage}}", "Encoding time: {{stage}}", "Embedding cache hit rate: {{stage}}"]
)
def test_chat_panels_are_empty_without_chat_replicas(tmp_path: Path, title: str):
    received = {'trimtab_requests_received_total{namespace="a",pipeline="p"}': "0+60x30"}
    asked_of_one(tmp_path, title, received, {'{stage="no stage"}': 0})


@pytest.mark.parametrize("prefix", ["", "exported_"])
@pytest.mark.parametrize(("shown", "value"), [("busy", 0.4), ("memory", 0.3)])
def test_gpu_panel_shows_utilization_by_dcgm(tmp_path: Path, prefix: str, shown: str, value: float):
    labels = f'{prefix}namespace="a",{prefix}pod="p-read-0",gpu="0"'
    figures = {"DCGM_FI_DEV_GPU_UTIL": 40, "DCGM_FI_DEV_FB_USED": 300, "DCGM_FI_DEV_FB_FREE": 700}
    series = {f"{name}{{{labels}}}": f"{figure}x30" for name, figure in figures.items()}
    asked_of_one(tmp_path, f"GPU utilization and memory: {{{{pod}}}} {shown}", series, {'{pod="p-read-0"}': value})


def asked_of_one(folder: Path, title: str, series: dict[str, str], figures: dict[str, float]) -> None:
    """What a panel shows of one pipeline beside another, by Prometheus' own rule tester."""
    query = next(filled_in(one.query, "a", "p", "5m") for one in dashboard_expressions() if one.title == title)
    others = {name.replace('pipeline="p"', 'pipeline="q"').replace('pod="p-', 'pod="q-'): "0+9x30" for name in series}
    samples = [{"labels": labels, "value": value} for labels, value in figures.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in (series | others).items()],
        "promql_expr_test": [{"expr": query, "eval_time": "20m", "exp_samples": samples}],
    }
    (folder / "test.yaml").write_text(json.dumps({"tests": [test]}))
    assert_promtool_accepts("test", "rules", "test.yaml", folder=folder)


BASE = 'namespace="a",pipeline="p"'


def outcome_series(ok: int, refused: int, callers: int | None) -> list[dict[str, str]]:
    """Eight hours, so many requests a minute."""
    rates = {f'trimtab_requests_total{{{BASE},outcome="ok"}}': ok}
    rates[f'trimtab_requests_total{{{BASE},outcome="refused"}}'] = refused
    if callers is not None:
        rates[f"trimtab_client_errors_total{{{BASE}}}"] = callers
    return [{"series": name, "values": f"0+{rate}x480"} for name, rate in rates.items()]


@pytest.mark.parametrize(
    ("ok", "refused", "callers", "pages"),
    [
        (100, 100, 100, False),  # half of all is one broken client
        (100, 100, 0, True),
        (100, 100, None, True),  # routers of before, which do not tell them apart
        (0, 100, 100, False),
        (100, 1000, 900, True),  # behind a broken client, others suffer too
    ],
)
def test_client_errors_do_not_page(tmp_path: Path, ok, refused, callers, pages):
    expression = 'count(ALERTS{alertname="TrimtabErrorBudgetBurnFast",alertstate="firing"}) or vector(0)'
    test = {
        "interval": "1m",
        "input_series": outcome_series(ok, refused, callers),
        "promql_expr_test": [
            {"expr": expression, "eval_time": "7h", "exp_samples": [{"labels": "{}", "value": int(pages)}]}
        ],
    }
    (tmp_path / "test.yaml").write_text(json.dumps({"rule_files": [alerts_file()], "tests": [test]}))
    assert_promtool_accepts("test", "rules", "test.yaml", folder=tmp_path)
