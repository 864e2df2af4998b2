"""Shell: list, then watch, for ever. Every object arrives at least once; a gap in the watch is filled by a new list."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from trimtab_kubernetes.client import Cluster, Object
from trimtab_kubernetes.errors import ClusterError, Gone, NotFound
from trimtab_kubernetes.kinds import Kind

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 10.0
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """An object as it is now; `deleted` with its last known state. `synced` marks the end of a list, without object."""

    key: Key = ("", "")
    object: Object | None = None
    deleted: bool = False
    synced: bool = False


async def follow(
    cluster: Cluster,
    kind: str | Kind,
    namespace: str | None = None,
    labels: str | None = None,
    *,
    name: str | None = None,
) -> AsyncIterator[Change]:
    """Yield every object of a kind, then every change of one; survives an API server that goes away.

    With a name, only the object of that name: who may read just that one may follow it.

    After each list one Change with `synced` follows. Objects that vanished during a gap are yielded as deleted.
    """
    known: dict[Key, Object] = {}
    version, backoff_seconds = "", 0.0
    while True:
        try:
            if not version:
                listing = await cluster.list(kind, namespace, labels, name)
                for change in _differences(known, listing.items):
                    yield change
                known = {key_of(item): item for item in listing.items}
                yield Change(synced=True)
                version = listing.resource_version
            async for what, found in cluster.watch(kind, namespace, labels, version, name):
                version = found["metadata"]["resourceVersion"]
                backoff_seconds = 0.0
                if what == "BOOKMARK":
                    continue
                key = key_of(found)
                if what == "DELETED":
                    known.pop(key, None)
                else:
                    known[key] = found
                yield Change(key, found, deleted=what == "DELETED")
        except Gone:
            version = ""
        except ClusterError as error:
            backoff_seconds = min(max(2 * backoff_seconds, FIRST_BACKOFF_SECONDS), LONGEST_BACKOFF_SECONDS)
            level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
            log.log(level, "%s; again in %.1f s", error, backoff_seconds)
            version = ""  # list anew: what was missed in between is not known
            await asyncio.sleep(backoff_seconds)


def key_of(found: Object) -> Key:
    """Return (namespace, name)."""
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _differences(known: dict[Key, Object], items: list[Object]) -> list[Change]:
    """Return what a list says that was not known: changed objects, and those that are gone."""
    now = {key_of(item): item for item in items}
    gone = [Change(key, last, deleted=True) for key, last in known.items() if key not in now]
    changed = [
        Change(key, item)
        for key, item in now.items()
        if key not in known or known[key]["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion")
    ]
    return gone + changed
