"""`MergedChunks`: the chunks of a streamed response as one object.

Texts are joined and lists extended; items with an index are merged with the earlier item of that index, as OpenAI's
clients do. Each chunk is merged as it arrives, at a cost that does not depend on those before it.
"""

from collections.abc import Mapping
from typing import Any

_REPLACED = frozenset({"id", "name", "role", "type"})
"""Texts that are not joined: engines may repeat them."""


class _Text(list[str]):
    """Pieces of a text."""


class _Items(list[Any]):
    """Items of a list; those with an index are also found by it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_index: dict[int, dict[str, Any]] = {}


class MergedChunks:
    """Chunks merged so far."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Merge a chunk; of a chunk's own texts and numbers, the latest count."""
        for name, value in chunk.items():
            if isinstance(value, list | dict):
                _merge(self._whole, {name: value})
            elif value is not None:
                self._whole[name] = value

    def result(self) -> dict[str, Any]:
        return {name: _finished(value) for name, value in self._whole.items()}


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        before = whole.get(name)
        if value is None or (value == "" and before is not None):
            whole.setdefault(name, None)
        elif isinstance(value, str) and name not in _REPLACED:
            whole[name] = before if isinstance(before, _Text) else _Text()
            whole[name].append(value)
        elif isinstance(value, dict):
            whole[name] = before if isinstance(before, dict) else {}
            _merge(whole[name], value)
        elif isinstance(value, list):
            whole[name] = before if isinstance(before, _Items) else _Items()
            _extend(whole[name], value)
        else:
            whole[name] = value


def _extend(items: _Items, added: list[Any]) -> None:
    for item in added:
        index = item.get("index") if isinstance(item, dict) else None
        if not isinstance(index, int):
            items.append(item)
            continue
        if index not in items.by_index:
            items.by_index[index] = {}
            items.append(items.by_index[index])
        _merge(items.by_index[index], item)


def _finished(value: Any) -> Any:
    match value:
        case _Text():
            return "".join(value)
        case list():
            return [_finished(item) for item in value]
        case dict():
            return {name: _finished(item) for name, item in value.items()}
    return value
