"""`Cache`: the latest known version of objects, from lists, watches and responses to own writes.

Updates may arrive in any order; an older version never replaces a newer one, unless the API server's store was restored
from a backup. While the API server is unreachable, objects are retained. They are stored as JSON, since dictionaries
take three times as much memory.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from trimtab_kubernetes.client import Cluster, Listing
from trimtab_kubernetes.objects import Key, Object, key_of, to_json, version_of
from trimtab_kubernetes.watch import Change, list_and_watch

log = logging.getLogger(__name__)

Group = TypeVar("Group", bound=Hashable)
OnChange = Callable[[Change, set[Group]], None]
"""Called with a change and the groups it affects; none if a newer version was known, such as an own write."""


class Entry(NamedTuple):
    """A stored object."""

    kind: str
    key: Key
    version: int
    uid: str | None
    group: Any
    text: bytes

    def read(self) -> Object:
        found: Object = orjson.loads(self.text)
        return found


class Cache(Generic[Group]):
    """The latest version of objects, by kind and name, and by their group; objects without group are not stored."""

    def __init__(self, group_of: Callable[[Object], Group | None]) -> None:
        self._group_of = group_of
        self._objects: dict[str, dict[Key, Entry]] = {}
        self._groups: dict[Group, dict[tuple[str, Key], Entry]] = {}
        self._rewound: set[tuple[str, Key]] = set()
        self.synced = asyncio.Event()

    def get(self, kind: str, key: Key) -> Object | None:
        entry = self._objects.get(kind, {}).get(key)
        return None if entry is None else entry.read()

    def keys(self, kind: str) -> list[Key]:
        return list(self._objects.get(kind, ()))

    def entries(self, group: Group) -> tuple[Entry, ...]:
        """What is stored of a group; the same as long as none of its objects changes."""
        return tuple(self._groups.get(group, {}).values())

    def group(self, group: Group) -> list[Object]:
        return [entry.read() for entry in self.entries(group)]

    def is_known(self, found: Object) -> bool:
        """Whether this version of an object, or a newer one, is known."""
        kind, key = found["kind"], key_of(found)
        known = self._objects.get(kind, {}).get(key)
        return known is not None and (kind, key) not in self._rewound and 0 < version_of(found) <= known.version

    def put(self, found: Object) -> set[Group]:
        """Store an object unless a newer version is known; return the affected groups."""
        if self.is_known(found):
            return set()
        kind, key, group = found["kind"], key_of(found), self._group_of(found)
        before = self._drop(kind, key)
        if group is None:
            return before
        metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
        text = to_json({name: found[name] for name in found if name != "binaryData"} | {"metadata": metadata})
        entry = Entry(kind, key, version_of(found), metadata.get("uid"), group, text)
        self._objects.setdefault(kind, {})[key] = self._groups.setdefault(group, {})[kind, key] = entry
        return before | {group}

    def remove(self, found: Object) -> set[Group]:
        """Remove a deleted object unless another one has its name; return the affected groups."""
        kind, key, group = found["kind"], key_of(found), self._group_of(found)
        known = self._objects.get(kind, {}).get(key)
        is_it = known is not None and known.uid == found["metadata"].get("uid")
        return (self._drop(kind, key) if is_it else set()) | ({group} if group is not None else set())

    def missing(self, kind: str, namespace: str | None, listing: Listing) -> list[Object]:
        """Known objects of a kind that are neither in a complete list of it nor newer."""
        listed, as_of = {key_of(item) for item in listing.items}, int(listing.resource_version or 0)
        return [
            entry.read()
            for key, entry in self._objects.get(kind, {}).items()
            if namespace in {None, key[0]}
            and key not in listed
            and (entry.version <= as_of or (kind, key) in self._rewound)
        ]

    def rewind(self, kind: str, namespace: str | None) -> None:
        """Let any version of the known objects be replaced: the API server has returned to an earlier state."""
        self._rewound |= {(kind, key) for key in self._objects.get(kind, {}) if namespace in {None, key[0]}}

    async def watch(
        self,
        cluster: Cluster,
        selectors: Mapping[str, str | None],
        namespaces: Sequence[str | None],
        on_change: OnChange[Group],
    ) -> None:
        """Watch kinds, each with its label selector, without end; `synced` is set once all were listed."""
        waiting = {(kind, namespace) for kind in selectors for namespace in namespaces}

        async def watch_kind(kind: str, namespace: str | None) -> None:
            async for change in list_and_watch(cluster, kind, namespace, selectors[kind]):
                if change.rewound:
                    self.rewind(kind, namespace)
                elif change.listing is not None:
                    for gone in self.missing(kind, namespace, change.listing):
                        on_change(Change(key_of(gone), gone, deleted=True), self.remove(gone))
                    waiting.discard((kind, namespace))
                    if not waiting:
                        self.synced.set()
                elif change.object is not None:
                    self._deliver(change, change.object, on_change)

        async with asyncio.TaskGroup() as watching:
            for kind, namespace in tuple(waiting):
                watching.create_task(watch_kind(kind, namespace))

    def _deliver(self, change: Change, found: Object, on_change: OnChange[Group]) -> None:
        """Store a change and report it. An object that raises, which may be one tenant's, does not end the watch."""
        try:
            on_change(change, self.remove(found) if change.deleted else self.put(found))
        except Exception:
            log.exception("%s %s/%s cannot be processed and is skipped", found["kind"], *change.key)

    def _drop(self, kind: str, key: Key) -> set[Group]:
        known = self._objects.get(kind, {}).pop(key, None)
        if known is None:
            return set()
        self._rewound.discard((kind, key))
        del self._groups[known.group][kind, key]
        if not self._groups[known.group]:
            del self._groups[known.group]
        return {known.group}
