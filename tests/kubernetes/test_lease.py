"""Leading and letting go, against a real API server."""

import asyncio
from typing import Any

from trimtab_kubernetes import Cluster
from trimtab_kubernetes.lease import Lease, leading


async def forever() -> None:
    await asyncio.Event().wait()


async def holder(cluster: Cluster, namespace: str) -> str:
    found = await cluster.get("Lease", namespace, "leader")
    assert found is not None
    return str(found["spec"]["holderIdentity"])


async def test_who_stops_lets_go_though_its_last_renewal_came_in_between(cluster, namespace, monkeypatch):
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
    async with leading(lease, forever), asyncio.timeout(60):
        while not lease.held:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        assert await holder(cluster, namespace) == "one"

    assert renewed
    assert await holder(cluster, namespace) == ""


async def test_who_stops_leaves_anothers_lease_alone(cluster, namespace):
    first, second = (Lease(cluster, namespace, "leader", name) for name in ("one", "two"))
    async with leading(first, forever), asyncio.timeout(60):
        while not first.held:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        await second.release()
        assert await holder(cluster, namespace) == "one"
