"""The load as Prometheus has it: a fake that speaks its protocol for the faults, a real server for the truth."""

import asyncio
import contextlib
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.control_plane import prometheus
from trimtab_adapter.load_sources import PrometheusSource
from trimtab_adapter.observation import Load
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.router_state import ARRIVALS_PEAK_RPS as PEAK
from trimtab_pipelines.router_state import RECEIVED
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.metrics_client import PrometheusServer, open_session, tls_context

NOW = 1_700_000_000.0
LABELS = '{namespace="default",pipeline="sample"}'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakePrometheus:
    """Answers the two query addresses with an age, peaks and means of its choice; None is a bin without a sample."""

    def __init__(self, age: float | None, peaks: list[Any], means: list[Any]) -> None:
        self.age, self.peaks, self.means = age, peaks, means
        self.queries: list[str] = []
        self.tokens: list[str | None] = []
        self.spans: list[float] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.queries.append(request.query["query"])
        self.tokens.append(request.headers.get("Authorization"))
        result = self._range(request) if "step" in request.query else self._instant()
        return web.json_response({"status": "success", "data": {"resultType": "it", "result": result}})

    def _instant(self) -> list[dict[str, Any]]:
        return [] if self.age is None else [{"metric": {}, "value": [NOW, str(self.age)]}]

    def _range(self, request: web.Request) -> list[dict[str, Any]]:
        self.spans.append(float(request.query["end"]) - float(request.query["start"]) + float(request.query["step"]))
        values = self.means if "rate(" in request.query["query"] else self.peaks
        samples = [
            [NOW - 10 * (len(values) - 1 - n), str(value)] for n, value in enumerate(values) if value is not None
        ]
        return [{"metric": {}, "values": samples}] if samples else []


@asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[str]:
    """Answer GET of any path."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


@asynccontextmanager
async def a_source(handler: Handler, token_file: Path | None = None) -> AsyncIterator[PrometheusSource]:
    async with serve(handler) as url, open_session(2.0) as client:
        yield PrometheusSource(PrometheusServer(client, url, token_file), "default", "sample")


async def test_seconds_keep_each_bin_s_peak_and_mean():
    fake = FakePrometheus(2.0, [0, 30, 12], [0, 12, 12])
    async with a_source(fake.answer) as source:
        load = await source.load(NOW)

    assert load.history_rps[0] > 0  # the empty bin before the first arrival is no history
    bins = [load.history_rps[:-10], load.history_rps[-10:]]
    assert [max(seconds) for seconds in bins] == [30.0, 12.0]
    assert sum(load.history_rps) == pytest.approx(240.0)
    assert all(LABELS in query for query in fake.queries)


async def test_as_much_is_asked_for_as_is_wanted():
    fake = FakePrometheus(2.0, [5.0] * 70, [5.0] * 70)
    async with a_source(fake.answer) as source:
        await source.load(NOW, MEMORY_SECONDS)
        await source.load(NOW + 10)

    assert fake.spans == [MEMORY_SECONDS] * 2 + [600.0] * 2


async def test_no_traffic_is_zero_load_not_a_fault():
    async with a_source(FakePrometheus(2.0, [0, 0], [0, 0]).answer) as source:
        assert set((await source.load(NOW)).history_rps) == {0.0}


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakePrometheus(None, [1], [1]), f"has no {PEAK}{LABELS}; is the router scraped?"),
        (FakePrometheus(95.0, [1], [1]), f"the newest {PEAK}{LABELS} is 95 s old, above 30 s"),
        (FakePrometheus(1.0, [], []), f"has no {PEAK}{LABELS}"),
        (FakePrometheus(1.0, [-3], [1]), f"sum({PEAK}{LABELS}) is -3 at {NOW:.0f}; expected 0 to 1e+07"),
        (FakePrometheus(1.0, ["NaN"], [1]), f"sum({PEAK}{LABELS}) is nan at {NOW:.0f}; expected 0 to 1e+07"),
        (FakePrometheus(1.0, ["lots"], [1]), "expected a Prometheus response, got \"{'status': 'success'"),
    ],
)
async def test_missing_stale_or_absurd_metrics_are_refused_by_name(fake, message):
    async with a_source(fake.answer) as source:
        with pytest.raises(ObservationError) as refused:
            await source.load(NOW)
    assert message in str(refused.value)


async def test_something_that_is_no_prometheus_is_refused():
    async def other(_: web.Request) -> web.Response:
        return web.json_response({"hello": "world"})

    async with a_source(other) as source:
        with pytest.raises(ObservationError, match=r"expected a Prometheus response, got \"\{'hello'"):
            await source.load(NOW)


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs the prometheus binary (Debian: apt install prometheus)"
)


@needs_prometheus
async def test_real_prometheus_reports_live_routers_only(tmp_path):
    """A sample with a time of its own is no longer renewed, but shown for five minutes: so is a dead router's."""
    scraped, scrapes = asyncio.Semaphore(0), itertools.count(1)

    async def metrics(_: web.Request) -> web.Response:
        scraped.release()
        alive, dead = (f'{{namespace="default",pipeline="sample",pod="{pod}"}}' for pod in ("alive", "dead"))
        lines = [f"{PEAK}{alive} 42", f"{PEAK}{dead} 500 {int(1000 * (time.time() - 60))}"]
        lines += [f"{RECEIVED}{alive} {10 * next(scrapes)}", f'{PEAK}{{namespace="default",pipeline="other"}} 7']
        return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")

    async with AsyncExitStack() as router, AsyncExitStack() as rest:
        target = await router.enter_async_context(serve(metrics))
        url = await rest.enter_async_context(a_prometheus(tmp_path, target))
        server = PrometheusServer(await rest.enter_async_context(open_session(2.0)), url)
        source = PrometheusSource(server, "default", "sample", ready_routers=lambda: 2)
        load = await first_load(source, scraped, 4)
        with pytest.raises(ObservationError, match=r"has no trimtab_arrivals_peak_rps.*is the router scraped\?"):
            await PrometheusSource(server, "elsewhere", "sample").load(time.time())
        await router.aclose()
        with pytest.raises(ObservationError, match=r"has no trimtab_arrivals_peak_rps|the newest .* s old"):
            await asyncio.wait_for(keep_asking(source), 60)

    assert load.peak_rps == 42.0
    assert 0 < sum(load.history_rps[-10:]) <= 420.0
    assert load.missing == "Prometheus has 1 of 2 routers"


async def test_seconds_without_samples_are_not_measured():
    async with a_source(FakePrometheus(2.0, [10, None, 30], [10, None, 30]).answer) as source:
        load = await source.load(NOW)

    assert [math.isnan(rps) for rps in load.history_rps] == [False] * 10 + [True] * 10 + [False] * 10
    assert load.peak_rps == 30.0


async def test_the_token_is_read_anew_for_each_question(tmp_path):
    token, fake = tmp_path / "token", FakePrometheus(2.0, [10], [10])
    async with a_source(fake.answer, token) as source:
        with pytest.raises(ObservationError, match=r"Prometheus token .*token: No such file") as missing:
            await source.load(NOW)
        token.write_text("first\n")
        await source.load(NOW)
        token.write_text("second\n")
        await source.load(NOW)

    assert missing.value.fault == "Missing"
    assert fake.tokens == ["Bearer first"] * 3 + ["Bearer second"] * 3


async def test_an_answer_without_end_is_cut_off():
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * 2**20)
        return response

    async with a_source(endless) as source:
        with pytest.raises(ObservationError, match="returned more than 8 MiB"):
            await source.load(NOW)


def test_certificates_that_are_missing_are_named(tmp_path):
    with pytest.raises(DocumentError, match=r"--prometheus-ca .*ca.crt: No such file"):
        tls_context(tmp_path / "ca.crt")
    (tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(DocumentError, match=r"--prometheus-ca .*ca.crt"):
        tls_context(tmp_path / "ca.crt")
    assert tls_context(None) is True


async def first_load(source: PrometheusSource, scraped: asyncio.Semaphore, scrapes: int) -> Load:
    """The load once there were so many scrapes that Prometheus did not give up on."""
    async with asyncio.timeout(60):
        while True:
            for _ in range(scrapes):
                await scraped.acquire()
            try:
                return await source.load(time.time())
            except ObservationError as error:
                if error.fault != "Missing":
                    raise


async def keep_asking(source: PrometheusSource) -> None:
    while True:
        await source.load(time.time())


@asynccontextmanager
async def a_prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run Debian's Prometheus on a free port, scraping the target every 200 ms."""
    address = target.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: router, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )
    with prometheus(folder) as (url, _):
        yield url
