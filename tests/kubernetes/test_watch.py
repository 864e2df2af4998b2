"""Watches across outages, expired resource versions and expired credentials of an API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.adapter.clusters import a_pipeline_of, profile_bodies
from tests.control_plane import TOKEN
from tests.kubernetes.test_client import a_config_map
from tests.tcp_relay import before_the_api_server
from trimtab_kubernetes import Change, Cluster, Unreachable, list_and_watch
from trimtab_kubernetes.client import Listing

KIND = "ConfigMap"


@asynccontextmanager
async def following(cluster: Cluster, namespace: str, kind: str = KIND) -> AsyncIterator["Observed"]:
    observed = Observed()

    async def watch() -> None:
        async for change in list_and_watch(cluster, kind, namespace, "test=client"):
            await observed.take(change)

    task = asyncio.create_task(watch())
    try:
        yield observed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Observed:
    """Objects that a watch reported, and the number of lists it took."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.lists = 0
        self._changed = asyncio.Condition()

    async def take(self, change: Change) -> None:
        async with self._changed:
            if change.synced:
                self.lists += 1
            elif change.deleted:
                self.names.discard(change.key[1])
            else:
                self.names.add(change.key[1])
            self._changed.notify_all()

    async def until(self, names: set[str], lists: int = 1) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.names == names and self.lists >= lists)


async def test_changes_during_an_outage_are_delivered(cluster, namespace, kubeconfig, tmp_path):
    await cluster.apply(a_config_map(namespace, "goes"), manager="one")
    async with before_the_api_server(kubeconfig, tmp_path) as (relay, through):
        await relay.open()
        async with await Cluster.connect(str(through)) as connected, following(connected, namespace) as observed:
            await observed.until({"goes"})
            await cluster.apply(a_config_map(namespace, "stays"), manager="one")
            await observed.until({"goes", "stays"})  # the watch runs: one that is cut before it begins may miss nothing
            await relay.close()
            await cluster.delete(KIND, namespace, "goes")
            await cluster.apply(a_config_map(namespace, "comes"), manager="one")
            await relay.open()
            await observed.until({"stays", "comes"}, lists=2)


class Forgetful(Cluster):
    """One whose first list is of a version that the server has long forgotten."""

    listed = 0

    async def pages(self, *of: Any, **options: Any) -> AsyncIterator[Listing]:
        self.listed += 1
        async for page in super().pages(*of, **options):
            yield Listing(page.items, "1") if self.listed == 1 else page


async def test_expired_version_triggers_a_list(cluster, namespace, kubeconfig):
    """Of a kind that was defined long after version 1: of the first ones the server remembers even that."""
    profile = profile_bodies(a_pipeline_of(namespace))[0]
    profile["metadata"]["labels"] = {"test": "client"}
    async with (
        await Forgetful.connect(str(kubeconfig)) as forgetful,
        following(forgetful, namespace, profile["kind"]) as observed,
    ):
        await observed.until(set(), lists=2)
        await cluster.apply(profile, manager="one")
        await observed.until({profile["metadata"]["name"]}, lists=2)


async def test_expired_credentials_are_reloaded(cluster, namespace, kubeconfig, tmp_path):
    written = kubeconfig.read_text()
    if TOKEN not in written:
        pytest.skip("the administrator of this API server has no token")
    rotated = tmp_path / "kubeconfig"
    rotated.write_text(written.replace(TOKEN, "ran-out"))
    await cluster.apply(a_config_map(namespace, "there"), manager="one")

    async with await Cluster.connect(str(rotated)) as connected:
        with pytest.raises(Unreachable, match="Unauthorized") as refused:
            await connected.list(KIND, namespace)
        async with following(connected, namespace) as observed:
            rotated.write_text(written)
            await observed.until({"there"})

    assert refused.value.status == 401


async def test_watches_leave_room_for_requests(cluster, namespace):
    """Each holds a connection: there may be more of them than requests at once."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as watching:
        reported = [asyncio.Event() for _ in range(50)]

        async def watch(synced: asyncio.Event) -> None:
            async for change in list_and_watch(cluster, KIND, namespace, name="there"):
                if change.key[1] == "there":
                    synced.set()
                    return

        for event in reported:
            watching.create_task(watch(event))
        await cluster.apply(a_config_map(namespace, "there"), manager="one")
        await asyncio.gather(*(event.wait() for event in reported))
