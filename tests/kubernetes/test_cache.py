"""Object cache fed in any order, and work queue with one worker per key and retries of failed keys."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from trimtab_kubernetes import Change, Cluster, Unreachable
from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.client import Listing
from trimtab_kubernetes.objects import version_of
from trimtab_kubernetes.work_queue import WorkQueue

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
        self._listings = [Listing([a_pod(90), a_pod(95, name="new")], "100"), Listing([a_pod(40)], "50")]

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Listing]:
        if not self._listings:
            await asyncio.Event().wait()
        yield self._listings.pop(0)

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        raise Unreachable("the connection was closed")
        yield


async def changes_of_restored(cache: Cache[str], poisonous: str = "") -> list[tuple[str, int]]:
    """Names and versions that a watch reports until the backup is listed; the consumer fails on a poisonous object."""
    seen: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def on_change(change: Change, _: set[str]) -> None:
        seen.put_nowait((change.key[1], version_of(change.object or {})))
        if change.key[1] == poisonous:
            raise OverflowError(change.key)

    watching = asyncio.create_task(cache.watch(Restored(), {"Pod": None}, [None], on_change))
    try:
        async with asyncio.timeout(10):
            return [await seen.get() for _ in range(4)]
    finally:
        watching.cancel()


async def test_state_restored_from_a_backup_is_accepted():
    cache = a_cache()

    assert await changes_of_restored(cache) == [("sample", 90), ("new", 95), ("sample", 40), ("new", 95)]
    assert cache.keys("Pod") == [HERE]
    assert cache.put(a_pod(41)) == {"one"}
    assert cache.put(a_pod(41)) == set()


async def test_watch_survives_an_object_that_raises(caplog):
    assert len(await changes_of_restored(a_cache(), poisonous=HERE[1])) == 4
    assert "Pod here/sample cannot be processed" in caplog.text


async def test_key_is_deduplicated_and_handled_once() -> None:
    queue: WorkQueue[str] = WorkQueue(time.monotonic)
    handled: list[str] = []
    idle, entered = asyncio.Event(), 0

    async def handle(key: str) -> None:
        nonlocal entered
        entered += 1
        assert entered == 1
        handled.append(key)
        if len(handled) == 1:
            queue.add("a")  # asked for while in hand: looked at once more afterwards
            queue.add("a")
        await asyncio.sleep(0)
        entered -= 1
        if len(handled) == 2:
            idle.set()

    queue.add("a")
    queue.add("a")
    workers = [asyncio.create_task(queue.work(handle)) for _ in range(3)]
    await asyncio.wait_for(idle.wait(), 10)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)

    assert handled == ["a", "a"]


async def test_failed_key_is_retried() -> None:
    queue: WorkQueue[str] = WorkQueue(time.monotonic)
    calls: list[float] = []
    done = asyncio.Event()

    async def handle(key: str) -> None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise RuntimeError("not yet")
        done.set()

    queue.add("a")
    worker = asyncio.create_task(queue.work(handle))
    await asyncio.wait_for(done.wait(), 10)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)

    assert calls[1] - calls[0] >= 0.2
