"""What the API server said last of some kinds: filled by lists, by watches and by the answers to our own writes.

They come in any order: an older version never replaces a newer one. While the server is away, what was known stays.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from trimtab_kubernetes.client import Cluster, Listing
from trimtab_kubernetes.objects import Key, Object, key_of, version_of
from trimtab_kubernetes.watch import Change, list_and_watch

Group = TypeVar("Group", bound=Hashable)
OnChange = Callable[[Change, set[Group]], None]
"""Told a change and the groups that it is news for: none where a newer version was known, such as our own write."""


class Cache(Generic[Group]):
    """The latest version of objects, by kind and name, and by the group they belong to.

    Args:
        group_of: what an object belongs to; one that belongs to nothing is not kept.
    """

    def __init__(self, group_of: Callable[[Object], Group | None]) -> None:
        self._group_of = group_of
        self._objects: dict[str, dict[Key, Object]] = {}
        self._groups: dict[Group, dict[tuple[str, Key], Object]] = {}
        self.synced = asyncio.Event()

    def get(self, kind: str, key: Key) -> Object | None:
        """An object, or None."""
        return self._objects.get(kind, {}).get(key)

    def keys(self, kind: str) -> list[Key]:
        """All keys of a kind."""
        return list(self._objects.get(kind, ()))

    def group(self, group: Group) -> list[Object]:
        """The objects of a group."""
        return list(self._groups.get(group, {}).values())

    def put(self, found: Object) -> set[Group]:
        """Take an object as it is now, unless a newer version is known; return the groups that this concerns."""
        kind, key = found["kind"], key_of(found)
        known = self.get(kind, key)
        if known is not None and 0 < version_of(found) <= version_of(known):
            return set()
        before, group = self._drop(known), self._group_of(found)
        if group is None:
            return before
        found["metadata"].pop("managedFields", None)  # half of an object's size, and nobody reads it here
        self._objects.setdefault(kind, {})[key] = self._groups.setdefault(group, {})[kind, key] = found
        return before | {group}

    def remove(self, found: Object) -> set[Group]:
        """Forget an object that is gone, unless another of that name has taken its place; return whom this concerns."""
        known, group = self.get(found["kind"], key_of(found)), self._group_of(found)
        is_it = known is not None and known["metadata"].get("uid") == found["metadata"].get("uid")
        return (self._drop(known) if is_it else set()) | ({group} if group is not None else set())

    def missing(self, kind: str, namespace: str | None, listing: Listing) -> list[Object]:
        """What is known of a kind and not in a complete list of it, nor newer than that."""
        listed, as_of = {key_of(item) for item in listing.items}, int(listing.resource_version or 0)
        return [
            found
            for key, found in self._objects.get(kind, {}).items()
            if namespace in {None, key[0]} and key not in listed and version_of(found) <= as_of
        ]

    async def watch(
        self,
        cluster: Cluster,
        selectors: Mapping[str, str | None],
        namespaces: Sequence[str | None],
        on_change: OnChange[Group],
    ) -> None:
        """Follow kinds, each by its label selector, for ever; `synced` is set once all were listed."""
        waiting = {(kind, namespace) for kind in selectors for namespace in namespaces}

        async def one(kind: str, namespace: str | None) -> None:
            async for change in list_and_watch(cluster, kind, namespace, selectors[kind]):
                if change.listing is not None:
                    for gone in self.missing(kind, namespace, change.listing):
                        on_change(Change(key_of(gone), gone, deleted=True), self.remove(gone))
                    waiting.discard((kind, namespace))
                    if not waiting:
                        self.synced.set()
                elif change.object is not None:
                    on_change(change, self.remove(change.object) if change.deleted else self.put(change.object))

        async with asyncio.TaskGroup() as following:
            for kind, namespace in tuple(waiting):
                following.create_task(one(kind, namespace))

    def _drop(self, known: Object | None) -> set[Group]:
        """Forget an object; return the group it belonged to."""
        if known is None:
            return set()
        kind, key, group = known["kind"], key_of(known), self._group_of(known)
        del self._objects[kind][key]
        assert group is not None  # noqa: S101 - else it would not have been kept
        del self._groups[group][kind, key]
        if not self._groups[group]:
            del self._groups[group]
        return {group}
