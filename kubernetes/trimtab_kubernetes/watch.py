"""Shell: list, then watch, for ever. Every object arrives at least once; a gap in the watch is filled by a new list."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from trimtab_kubernetes.backoff import Backoff
from trimtab_kubernetes.client import Cluster, Listing
from trimtab_kubernetes.errors import ClusterError, NotFound, Unreachable
from trimtab_kubernetes.kinds import Kind
from trimtab_kubernetes.objects import Key, Object, key_of

log = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
MIN_WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """An object as it is now; `deleted` with its last known state. The end of a list comes with it, without object."""

    key: Key = ("", "")
    object: Object | None = None
    deleted: bool = False
    listing: Listing | None = None

    @property
    def synced(self) -> bool:
        """Whether all that there was has been told."""
        return self.listing is not None


async def list_and_watch(
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
    version, pauses = "", Backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    while True:
        began, heard = math.inf, False
        try:
            if not version:
                listing = await cluster.list(kind, namespace, labels, name)
                for change in _differences(known, listing.items):
                    yield change
                known = {key_of(item): item for item in listing.items}
                yield Change(listing=listing)
                version = listing.resource_version
            began = time.monotonic()
            async for what, found in cluster.watch(kind, namespace, labels, version, name):
                version, heard = found["metadata"]["resourceVersion"], True
                if what == "BOOKMARK":
                    continue
                key = key_of(found)
                if what == "DELETED":
                    known.pop(key, None)
                else:
                    known[key] = found
                yield Change(key, found, deleted=what == "DELETED")
            if not heard and time.monotonic() - began < MIN_WATCH_SECONDS:
                raise Unreachable(f"watch of {kind} ended at once")
        except ClusterError as error:
            if heard or time.monotonic() - began > MAX_BACKOFF_SECONDS:  # this is another outage
                pauses.reset()
            pause_seconds = pauses.next_seconds(error)
            level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
            log.log(level, "%s; again in %.1f s", error, pause_seconds)
            version = ""  # list anew: what was missed in between is not known, nor whether the version still is
            await asyncio.sleep(pause_seconds)


def _differences(known: dict[Key, Object], items: list[Object]) -> list[Change]:
    """What a list says that was not known: changed objects, and those that are gone."""
    now = {key_of(item): item for item in items}
    gone = [Change(key, last, deleted=True) for key, last in known.items() if key not in now]
    changed = [
        Change(key, item)
        for key, item in now.items()
        if key not in known or known[key]["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion")
    ]
    return gone + changed
