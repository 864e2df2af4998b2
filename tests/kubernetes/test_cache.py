"""Object cache fed in any order by lists, watches and the responses to writes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from trimtab_kubernetes import Change, Cluster, Unreachable
from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.client import Listing

HERE = ("here", "sample")


def a_pod(version: int, owner: str | None = "one", *, uid: str = "u1", name: str = "sample") -> dict[str, Any]:
    labels = {} if owner is None else {"of": owner}
    metadata = {"namespace": "here", "name": name, "uid": uid, "labels": labels, "resourceVersion": str(version)}
    return {"kind": "Pod", "metadata": metadata | {"managedFields": [{"manager": "kubectl"}]}}


def a_cache(*pods: dict[str, Any]) -> Cache[str]:
    cache: Cache[str] = Cache(lambda found: found["metadata"]["labels"].get("of"))
    for pod in pods:
        cache.put(pod)
    return cache


def version(cache: Cache[str]) -> int:
    found = cache.get("Pod", HERE)
    assert found is not None
    return int(found["metadata"]["resourceVersion"])


def test_older_version_does_not_replace_a_newer_one():
    cache = a_cache(a_pod(5))

    assert cache.put(a_pod(4)) == set()
    assert cache.put(a_pod(5)) == set()
    assert version(cache) == 5
    assert cache.put(a_pod(6)) == {"one"}
    assert version(cache) == 6


def test_moved_object_affects_both_groups():
    cache = a_cache(a_pod(1))

    assert cache.put(a_pod(2, "other")) == {"one", "other"}
    assert cache.group("one") == []
    assert [pod["metadata"]["resourceVersion"] for pod in cache.group("other")] == ["2"]
    assert cache.put(a_pod(3, None)) == {"other"}
    assert cache.get("Pod", HERE) is None


def test_deletion_of_a_replaced_object_is_ignored():
    cache = a_cache(a_pod(7, uid="u2"))

    assert cache.remove(a_pod(6, uid="u1")) == {"one"}
    assert version(cache) == 7
    cache.remove(a_pod(8, uid="u2"))
    assert cache.get("Pod", HERE) is None
    assert (cache.group("one"), cache.keys("Pod")) == ([], [])


def test_list_reports_missing_but_not_newer_objects():
    cache = a_cache(a_pod(3, name="gone"), a_pod(4, name="listed"), a_pod(9, name="written"))
    listing = Listing([a_pod(4, name="listed")], "8")

    assert [found["metadata"]["name"] for found in cache.missing("Pod", None, listing)] == ["gone"]
    assert cache.missing("Pod", "elsewhere", listing) == []
    assert cache.missing("Deployment", None, listing) == []


def test_managed_fields_are_dropped():
    found = a_cache(a_pod(1)).get("Pod", HERE)

    assert found is not None
    assert "managedFields" not in found["metadata"]


class Restored(Cluster):
    """An API server whose second list is from a backup of its store; its watches end at once."""

    def __init__(self) -> None:
        self._listings = [
            Listing([a_pod(90), a_pod(95, name="created-after-the-backup")], "100"),
            Listing([a_pod(40)], "50"),
        ]

    async def list(self, *_: object) -> Listing:
        if not self._listings:
            await asyncio.Event().wait()
        return self._listings.pop(0)

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        raise Unreachable("the connection was closed")
        yield


async def test_state_restored_from_a_backup_is_accepted():
    cache, deleted, synced = a_cache(), [], asyncio.Event()

    def on_change(change: Change, _: set[str]) -> None:
        if change.deleted:
            deleted.append(change.key[1])
            synced.set()

    watching = asyncio.create_task(cache.watch(Restored(), {"Pod": None}, [None], on_change))
    async with asyncio.timeout(10):
        await synced.wait()
    watching.cancel()

    assert deleted[0] == "created-after-the-backup"
    assert version(cache) == 40
    assert cache.put(a_pod(41)) == {"one"}
    assert cache.put(a_pod(41)) == set()
