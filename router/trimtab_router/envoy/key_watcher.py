"""Watches API keys in a file or a Secret. A removed key is rejected at once."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol.event_loop import Service
from trimtab_router.envoy.api_keys import HashedKey, ParsedKeys, read_entries, read_file, read_secret
from trimtab_router.file_changes import changes

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

log = logging.getLogger(__name__)

SECRET = "Secret"  # noqa: S105 - a kind
_MAX_FILE_BYTES = 4 * 2**20
Use = Callable[[Sequence[HashedKey]], None]


class ApiKeys:
    """Current keys of a source. Reports each change once."""

    def __init__(self, source: str, use: Use) -> None:
        self._source = source
        self._use = use
        self._parsed: ParsedKeys | None = None

    def apply_if_unset(self, parsed: ParsedKeys) -> None:
        if self._parsed is None:
            self.apply(parsed)

    def apply(self, parsed: ParsedKeys) -> None:
        if parsed == self._parsed:
            return
        for problem in parsed.problems:
            log.warning("%s: %s", self._source, problem)
        log.info("%s: %d keys in use: %s", self._source, len(parsed.keys), _client_names(parsed.keys))
        self._parsed = parsed
        self._use(parsed.keys)


def key_watch(settings: EdgeSettings, cluster: "Cluster | None", namespace: str, use: Use) -> Service | None:
    """Watch of the keys that the settings name, None if they name none. RuntimeError: a Secret without a cluster."""
    if settings.keys_file:
        return partial(watch_file, Path(settings.keys_file), use)
    if settings.keys_secret is None:
        return None
    if cluster is None:
        raise RuntimeError(f"keysSecret {settings.keys_secret}: there is no cluster to read it from; name a keysFile")
    return partial(watch_secret, cluster, namespace, settings.keys_secret, use)


async def watch_file(path: Path, use: Use) -> None:
    """Watch a key file forever. Without the file all keys are rejected."""
    keys, folder = ApiKeys(str(path), use), path.resolve().parent  # noqa: ASYNC240 - once, at the start
    async for _ in changes(folder):
        keys.apply(read_keys(path))


async def watch_secret(cluster: "Cluster", namespace: str, name: str, use: Use) -> None:
    """Watch a Secret of keys forever. Without the Secret all keys are rejected."""
    from trimtab_kubernetes import list_and_watch  # noqa: PLC0415  (takes a second of processor time to import)

    keys = ApiKeys(f"Secret {namespace}/{name}", use)
    async for change in list_and_watch(cluster, SECRET, namespace, name=name):
        if change.synced:
            keys.apply_if_unset(ParsedKeys())  # there is no such Secret
        if change.key != (namespace, name):
            continue
        keys.apply(
            ParsedKeys() if change.deleted or change.object is None else read_secret(change.object.get("data") or {})
        )


def read_keys(path: Path) -> ParsedKeys:
    """Read a key file, or the folder of a mounted Secret. Problems are returned, not raised."""
    try:
        if path.is_dir():
            return read_entries((file.name, file.read_text()) for file in path.iterdir() if file.is_file())
        if path.stat().st_size > _MAX_FILE_BYTES:
            return ParsedKeys(problems=(f"more than {_MAX_FILE_BYTES} bytes",))
        return read_file(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        return ParsedKeys(problems=(f"cannot be read: {error}",))


def _client_names(keys: Sequence[HashedKey]) -> str:
    names = [key.client for key in keys[:20]]
    return ", ".join([*names, "…"] if len(keys) > len(names) else names)
