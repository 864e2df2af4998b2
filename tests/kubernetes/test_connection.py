"""`Connection`: retries of requests that a busy server rejects, and of no others."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from trimtab_kubernetes import Cluster, Rejected, Unreachable
from trimtab_kubernetes.errors import error_for


class Busy:
    """An API server that has no room for the first requests."""

    def __init__(self, refusals: int, retry_after: str, status: int = 429) -> None:
        self._refusals, self._retry_after, self._status = refusals, retry_after, status
        self.requests = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.requests += 1
        if self.requests > self._refusals:
            return web.json_response({"metadata": {"name": "there"}})
        body: dict[str, Any] = {"kind": "Status", "message": "too many requests"}
        return web.json_response(body, status=self._status, headers={"Retry-After": self._retry_after})


@asynccontextmanager
async def connected(server: Busy, folder: Path) -> AsyncIterator[Cluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "clusters": [{"name": "tests", "cluster": {"server": address}}],
        "users": [{"name": "tests", "user": {"token": "any"}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    try:
        async with await Cluster.connect(str(kubeconfig)) as cluster:
            yield cluster
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [429, 503])
async def test_request_is_retried_after_retry_after(tmp_path, status):
    server = Busy(1, "1", status)
    async with connected(server, tmp_path) as cluster:
        began = time.monotonic()
        await cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "there"}}, manager="one")

    assert time.monotonic() - began >= 1.0
    assert server.requests == 2


async def test_long_retry_after_is_reported(tmp_path):
    server = Busy(1, "60")
    async with connected(server, tmp_path) as cluster:
        with pytest.raises(Unreachable, match="too many requests") as busy:
            await cluster.get("ConfigMap", "here", "there")

    assert busy.value.retry_after_seconds == 60.0
    assert server.requests == 1


async def test_rejected_request_is_not_retried(tmp_path):
    server = Busy(9, "1", status=422)
    async with connected(server, tmp_path) as cluster:
        with pytest.raises(Rejected):
            await cluster.get("ConfigMap", "here", "there")

    assert server.requests == 1


async def test_former_leader_does_not_retry_writes(tmp_path):
    server, leads = Busy(1, "1"), iter([True, False])
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "there"}}
    async with connected(server, tmp_path) as cluster:
        with pytest.raises(Unreachable, match="may not be the leader"):
            await cluster.with_write_guard(lambda: next(leads)).create(body, manager="one")

    assert server.requests == 1


@pytest.mark.parametrize(
    ("written", "seconds"), [("3", 3.0), ("", 0.0), ("soon", 0.0), ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0)]
)
def test_only_numeric_retry_after_is_used(written, seconds):
    assert error_for(429, "busy", written).retry_after_seconds == seconds
