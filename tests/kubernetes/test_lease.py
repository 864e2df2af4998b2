"""`Lease`: acquisition, loss and release, against a real API server."""

import asyncio
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trimtab_kubernetes import Cluster, Conflict, Unreachable
from trimtab_kubernetes.lease import Lease, Timing, leader_election
from trimtab_kubernetes.objects import rfc3339_micro

QUICK = Timing(lease_duration_seconds=1, renew_deadline_seconds=0.5, retry_period_seconds=0.05)


async def forever() -> None:
    await asyncio.Event().wait()


async def holder(cluster: Cluster, namespace: str) -> str:
    found = await cluster.get("Lease", namespace, "leader")
    assert found is not None
    return str(found["spec"]["holderIdentity"])


async def test_release_retries_after_a_concurrent_renewal(cluster, namespace, monkeypatch):
    """A renewal that was cancelled may have been written all the same, after the lease was read to be let go."""
    replace = cluster.replace
    renewed: list[Any] = []

    async def replaced(body: dict[str, Any], *, manager: str) -> dict[str, Any]:
        if not body["spec"]["holderIdentity"] and not renewed:
            found = await cluster.get("Lease", namespace, "leader")
            found["spec"]["renewTime"] = "2100-01-01T00:00:00.000000Z"
            renewed.append(await replace(found, manager=manager))
        return dict(await replace(body, manager=manager))

    monkeypatch.setattr(cluster, "replace", replaced)
    lease = Lease(cluster, namespace, "leader", "one")
    async with leader_election(lease, forever), asyncio.timeout(60):
        while not lease.is_held:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        assert await holder(cluster, namespace) == "one"

    assert renewed
    assert await holder(cluster, namespace) == ""


async def test_release_keeps_another_holders_lease(cluster, namespace):
    first, second = (Lease(cluster, namespace, "leader", name) for name in ("one", "two"))
    async with leader_election(first, forever), asyncio.timeout(60):
        while not first.is_held:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        await second.release()
        assert await holder(cluster, namespace) == "one"


class Work:
    """Work of a leader, with events for its begin and its end."""

    def __init__(self) -> None:
        self.began, self.stopped = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()


@asynccontextmanager
async def a_leader(cluster: Cluster, namespace: str, *, keep_running: bool = False):
    lease, work = Lease(cluster, namespace, "leader", "one", QUICK), Work()
    async with leader_election(lease, work, keep_running=keep_running), asyncio.timeout(60):
        await work.began.wait()
        yield lease, work


async def take_away(cluster: Cluster, namespace: str, by: str) -> None:
    """Write another holder into the lease, as one would whose clock says that it has run out."""
    while True:
        found = await cluster.get("Lease", namespace, "leader")
        assert found is not None
        found["spec"] |= {"holderIdentity": by, "leaseDurationSeconds": 3600}
        try:
            await cluster.replace(found, manager=by)
        except Conflict:
            continue
        return


async def test_expired_lease_is_acquired(cluster, namespace):
    body: dict[str, Any] = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    body["metadata"] = {"name": "leader", "namespace": namespace}
    body["spec"] = {"holderIdentity": "gone", "leaseDurationSeconds": 2, "leaseTransitions": 0}
    body["spec"] |= dict.fromkeys(("acquireTime", "renewTime"), rfc3339_micro(time.time()))
    await cluster.create(body, manager="gone")
    began = time.monotonic()
    async with a_leader(cluster, namespace):
        assert time.monotonic() - began >= 2
        assert await holder(cluster, namespace) == "one"
        found = await cluster.get("Lease", namespace, "leader")
        assert found["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("keep_running", [False, True])
async def test_leader_stops_if_another_holds_the_lease(cluster, namespace, keep_running):
    async with a_leader(cluster, namespace, keep_running=keep_running) as (lease, work):
        await take_away(cluster, namespace, "other")
        await work.stopped.wait()
        assert not lease.is_held
    assert await holder(cluster, namespace) == "other"


async def test_leader_stops_if_it_cannot_renew(cluster, namespace):
    reachable = asyncio.Event()
    reachable.set()
    async with a_leader(cluster.with_write_guard(reachable.is_set), namespace) as (lease, work):
        reachable.clear()
        await work.stopped.wait()
        assert not lease.is_held
        assert await holder(cluster, namespace) == "one"  # it stops before another candidate acquires the lease


async def test_continuing_leader_does_not_write_until_renewal(cluster, namespace):
    reachable = asyncio.Event()
    reachable.set()
    async with a_leader(cluster.with_write_guard(reachable.is_set), namespace, keep_running=True) as (lease, work):
        writes = cluster.with_write_guard(lambda: lease.is_held)
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "written", "namespace": namespace}}
        reachable.clear()
        while lease.is_held:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        with pytest.raises(Unreachable, match="may not be the leader"):
            await writes.apply(body, manager="one")
        assert await writes.get("ConfigMap", namespace, "written") is None
        assert not work.stopped.is_set()
        reachable.set()
        while not lease.is_held:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        assert not work.stopped.is_set()
