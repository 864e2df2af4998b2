"""`list_and_watch`: every object and every change of a kind.

Each object is delivered at least once; after a failed watch the objects are listed again.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from trimtab_kubernetes.client import Cluster, Listing
from trimtab_kubernetes.errors import Backoff, ClusterError, NotFound, Unreachable
from trimtab_kubernetes.kinds import Kind
from trimtab_kubernetes.objects import Key, Object, key_of, to_json

log = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
MIN_WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """An object's current state; `deleted` with its last known metadata. `managedFields` are left out.

    The end of a list is a change with a listing of names only. A list older than what the watch has seen, which the API
    server returns after its store was restored from a backup, begins with a change that is `rewound` only.
    """

    key: Key = ("", "")
    object: Object | None = None
    deleted: bool = False
    listing: Listing | None = None
    rewound: bool = False

    @property
    def synced(self) -> bool:
        return self.listing is not None


class _Known(NamedTuple):
    """The version of an object and, in JSON, what identifies it; all of thousands would take as much as a cache."""

    version: str | None
    identity: bytes

    @classmethod
    def of(cls, found: Object) -> "_Known":
        metadata = found["metadata"]
        metadata.pop("managedFields", None)  # half of an object's size
        identity: Object = {name: found[name] for name in ("apiVersion", "kind", "metadata") if name in found}
        return cls(metadata.get("resourceVersion"), to_json(identity))


async def list_and_watch(
    cluster: Cluster,
    kind: str | Kind,
    namespace: str | None = None,
    labels: str | None = None,
    *,
    name: str | None = None,
) -> AsyncIterator[Change]:
    """Yield every object of a kind, then every change, without end; retries if the API server is unreachable.

    With a name, only the object of that name, which requires permission for that object only. Each list is followed by
    a change with `synced`. Objects that were deleted during a gap are yielded as deleted.
    """
    known: dict[Key, _Known] = {}
    version, last_version, backoff = "", 0, Backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    while True:
        began, received = math.inf, False
        try:
            if not version:
                async for change in _list(cluster.pages(kind, namespace, labels, name), known, last_version):
                    yield change
                    version = change.listing.resource_version if change.listing else ""
            began = time.monotonic()
            async for what, found in cluster.watch(kind, namespace, labels, version, name):
                version, received = found["metadata"]["resourceVersion"], True
                if what == "BOOKMARK":
                    continue
                key = key_of(found)
                if what == "DELETED":
                    known.pop(key, None)
                else:
                    known[key] = _Known.of(found)
                yield Change(key, found, deleted=what == "DELETED")
            if not received and time.monotonic() - began < MIN_WATCH_SECONDS:
                raise Unreachable(f"watch of {kind} ended immediately")
        except ClusterError as error:
            if received or time.monotonic() - began > MAX_BACKOFF_SECONDS:  # a new outage
                backoff.reset()
            delay_seconds = backoff.next_seconds(error)
            level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
            log.log(level, "%s; retrying in %.1f s", error, delay_seconds)
            last_version = int(version or last_version)
            version = ""  # list again: changes were missed, and the version may be too old
            await asyncio.sleep(delay_seconds)


async def _list(pages: AsyncIterator[Listing], known: dict[Key, _Known], last_version: int) -> AsyncIterator[Change]:
    """Update the known objects by a list, which may be older than `last_version`; yield what has changed."""
    listed = set[Key]()
    async for page in pages:
        if not listed and int(page.resource_version or 0) < last_version:
            yield Change(rewound=True)
        for item in page.items:
            key, before = key_of(item), known.get(key_of(item))
            known[key] = _Known.of(item)
            listed.add(key)
            if before is None or before.version != known[key].version:
                yield Change(key, item)
    for key in known.keys() - listed:
        yield Change(key, orjson.loads(known.pop(key).identity), deleted=True)
    names: list[Object] = [{"metadata": {"namespace": key[0], "name": key[1]}} for key in listed]
    yield Change(listing=Listing(names, page.resource_version))
