"""Shell: follows the keys that callers may show, in a file or a Secret; one that is taken away is refused at once."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from watchfiles import awatch

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.api_keys import HashedKey, ParsedKeys, read_file, read_secret

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

log = logging.getLogger(__name__)

SECRET = "Secret"  # noqa: S105 - a kind
_POLL_MILLISECONDS = 1000
_MAX_FILE_BYTES = 4 * 2**20
Use = Callable[[Sequence[HashedKey]], None]


class ApiKeys:
    """What is known of the keys; tells of each change, once.

    Args:
        where: what is read, for the log.
        use: told the keys in force.
    """

    def __init__(self, where: str, use: Use) -> None:
        self._where = where
        self._use = use
        self._found: ParsedKeys | None = None

    def take_first(self, found: ParsedKeys) -> None:
        """Put these keys in force unless some are."""
        if self._found is None:
            self.take(found)

    def take(self, found: ParsedKeys) -> None:
        """Put these keys in force."""
        if found == self._found:
            return
        for problem in found.problems:
            log.warning("%s: %s", self._where, problem)
        log.info("%s: %d keys are in force: %s", self._where, len(found.keys), _named(found.keys))
        self._found = found
        self._use(found.keys)


def follow_keys(
    settings: EdgeSettings, cluster: "Cluster | None", namespace: str, use: Use
) -> Coroutine[Any, Any, None] | None:
    """Follow the keys that the settings ask for; None where they ask for none.

    Raises:
        RuntimeError: they are in a Secret, and there is no cluster.
    """
    if settings.keys_file:
        return follow_file(Path(settings.keys_file), use)
    if settings.keys_secret is None:
        return None
    if cluster is None:
        raise RuntimeError(f"keysSecret {settings.keys_secret}: there is no cluster to read it from; name a keysFile")
    return follow_secret(cluster, namespace, settings.keys_secret, use)


async def follow_file(path: Path, use: Use) -> None:
    """Follow a file of keys for ever; a file that is gone lets nobody in."""
    keys, folder = ApiKeys(str(path), use), path.resolve().parent  # noqa: ASYNC240 - once, at the start
    keys.take(read_keys(path))
    async for _ in awatch(
        folder,
        recursive=False,
        step=20,
        debounce=100,
        rust_timeout=_POLL_MILLISECONDS,
        yield_on_timeout=True,
    ):
        keys.take(read_keys(path))


async def follow_secret(cluster: "Cluster", namespace: str, name: str, use: Use) -> None:
    """Follow a Secret of keys for ever; one that is gone lets nobody in."""
    from trimtab_kubernetes import list_and_watch  # noqa: PLC0415  (takes a second of processor time to import)

    keys = ApiKeys(f"Secret {namespace}/{name}", use)
    async for change in list_and_watch(cluster, SECRET, namespace, name=name):
        if change.synced:
            keys.take_first(ParsedKeys())  # there is no such Secret
        if change.key != (namespace, name):
            continue
        keys.take(
            ParsedKeys() if change.deleted or change.object is None else read_secret(change.object.get("data") or {})
        )


def read_keys(path: Path) -> ParsedKeys:
    """Read a file of keys; what is wrong with it is told, not raised."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return ParsedKeys(problems=(f"more than {_MAX_FILE_BYTES} bytes",))
        return read_file(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        return ParsedKeys(problems=(f"cannot be read: {error}",))


def _named(keys: Sequence[HashedKey]) -> str:
    names = [key.client for key in keys[:20]]
    return ", ".join([*names, "…"] if len(keys) > len(names) else names)
