"""What the API server said last. Shell around `follow`: while the server is away, what was known stays."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trimtab_kubernetes import Cluster, follow
from trimtab_kubernetes.client import Object
from trimtab_kubernetes.follow import Key

log = logging.getLogger(__name__)

PIPELINE, PROFILE, PLAN, SLICE = "InferencePipeline", "ModelProfile", "PipelinePlan", "EndpointSlice"
KINDS = (PIPELINE, PROFILE, PLAN, SLICE)
SERVICE_LABEL = "kubernetes.io/service-name"
OnChange = Callable[[str, Key, Object, bool], None]


@dataclass(slots=True)
class Known:
    """Objects by namespace and name; profiles and slices also by what they belong to."""

    objects: dict[str, dict[Key, Object]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    owners: dict[tuple[str, Key], dict[str, Object]] = field(default_factory=dict)

    def get(self, kind: str, key: Key) -> Object | None:
        """Return an object, or None."""
        return self.objects[kind].get(key)

    def keys(self, kind: str) -> Iterable[Key]:
        """Return all keys of a kind."""
        return list(self.objects[kind])

    def belonging(self, kind: str, namespace: str, owner: str) -> Iterator[Object]:
        """Return the profiles of a pipeline, or the slices of a Service."""
        yield from self.owners.get((kind, (namespace, owner)), {}).values()

    def put(self, kind: str, key: Key, found: Object) -> None:
        """Take an object as it is now."""
        self.drop(kind, key)
        self.objects[kind][key] = found
        owner = owner_of(kind, found)
        if owner is not None:
            self.owners.setdefault((kind, (key[0], owner)), {})[key[1]] = found

    def drop(self, kind: str, key: Key) -> None:
        """Forget an object."""
        before = self.objects[kind].pop(key, None)
        owner = None if before is None else owner_of(kind, before)
        if owner is not None:
            belongings = self.owners.get((kind, (key[0], owner)), {})
            belongings.pop(key[1], None)
            if not belongings:
                self.owners.pop((kind, (key[0], owner)), None)


def owner_of(kind: str, found: Object) -> str | None:
    """Return the pipeline of a profile, or the Service of a slice."""
    if kind == PROFILE:
        return str(found.get("spec", {}).get("pipeline", ""))
    if kind == SLICE:
        return str(found["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))
    return None


async def keep_up(
    cluster: Cluster, known: Known, namespaces: Sequence[str | None], on_change: OnChange, synced: asyncio.Event
) -> None:
    """Follow all kinds for ever, and set `synced` once each was listed."""
    waiting = {(kind, namespace) for kind in KINDS for namespace in namespaces}

    async def one(kind: str, namespace: str | None) -> None:
        labels = SERVICE_LABEL if kind == SLICE else None
        async for change in follow(cluster, kind, namespace, labels):
            if change.synced:
                waiting.discard((kind, namespace))
                if not waiting and not synced.is_set():
                    log.info("%d pipelines known", len(known.objects[PIPELINE]))
                    synced.set()
                continue
            found = change.object or {}
            if change.deleted:
                known.drop(kind, change.key)
            else:
                known.put(kind, change.key, found)
            on_change(kind, change.key, found, change.deleted)

    async with asyncio.TaskGroup() as following:
        for kind, namespace in tuple(waiting):
            following.create_task(one(kind, namespace))
