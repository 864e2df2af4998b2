"""Client of an API server: applied objects, and retries of requests that a busy server rejects, and of no others."""

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.control_plane import write_kubeconfig
from trimtab_kubernetes import Cluster, Conflict, Rejected, Unreachable
from trimtab_kubernetes.errors import Backoff, error_for
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.errors import backoff


def a_config_map(namespace: str, name: str = "settings", **data: str) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": {"test": "client"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def test_field_of_another_manager_is_a_conflict(cluster: Cluster, namespace: str):
    await cluster.apply(a_config_map(namespace, colour="red"), manager="one")

    with pytest.raises(Conflict, match="colour"):
        await cluster.apply(a_config_map(namespace, colour="blue"), manager="two", force=False)


async def test_missing_object_is_none(cluster: Cluster, namespace: str):
    assert await cluster.get("ConfigMap", namespace, "nothing") is None
    assert not await cluster.delete("ConfigMap", namespace, "nothing")


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


class Paged:
    """An API server of three objects that returns two at a time."""

    async def answer(self, request: web.Request) -> web.Response:
        assert int(request.query["limit"]) > 2
        start = int(request.query.get("continue", "0"))
        metadata = {"resourceVersion": "7"} | ({"continue": "2"} if not start else {})
        items = [{"metadata": {"name": name}} for name in ("a", "b", "c")[start : start + 2]]
        return web.json_response({"metadata": metadata, "items": items})


@asynccontextmanager
async def connected(server: Busy | Paged, folder: Path) -> AsyncIterator[Cluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app) as serving:
        kubeconfig = write_kubeconfig(folder, {"server": f"http://127.0.0.1:{serving.port}"})
        async with await Cluster.connect(str(kubeconfig)) as cluster:
            yield cluster


async def test_list_has_the_objects_of_all_pages(tmp_path):
    async with connected(Paged(), tmp_path) as cluster:
        listing = await cluster.list("ConfigMap", "here")

    assert [item["metadata"]["name"] for item in listing.items] == ["a", "b", "c"]
    assert listing.resource_version == "7"


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


AWAY = Unreachable("away")


def test_backoff_doubles_up_to_its_maximum():
    assert list(itertools.islice(backoff(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_backoff_has_jitter_and_resets():
    pauses = Backoff(0.2, 10.0)

    first, *_, last = [pauses.next_seconds(AWAY) for _ in range(10)]
    pauses.reset()

    assert 0.1 <= first <= 0.2
    assert 5.0 <= last <= 10.0
    assert 0.1 <= pauses.next_seconds(AWAY) <= 0.2
    assert len({Backoff(1.0, 1.0).next_seconds(AWAY) for _ in range(10)}) > 1


def test_retry_after_is_respected():
    assert Backoff(0.2, 10.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=30.0)) == 30.0
    assert Backoff(60.0, 60.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=1.0)) >= 30.0
