"""Weights from the Hugging Face Hub, by its client huggingface_hub, in the client's own cache layout.

A repository may have a revision. A commit pins the content: cached files of it are never requested again. For any other
revision the newest commit is used and logged, so that it can be pinned.

If the Hub is unavailable, a file that was fetched before is used. Its host is tried first: the client would retry for
more than a minute if it cannot be reached.
"""

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights import files
from trimtab_model_servers.weights.cache import enforce_bound, hub_folder
from trimtab_model_servers.weights.files import SUFFIX, FetchLimits

_REQUEST_SECONDS = 10.0
_CONNECT_SECONDS, _CONNECTION_SECONDS = 5.0, 30.0
"""Time limit of a connection, and how long its result is used for other files."""
_COMMIT, _REVISION = re.compile(r"[0-9a-f]{40}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class HubUnreachable(ModelError):
    """The Hub cannot be reached."""


def fetch_from_hub(address: str, limits: FetchLimits) -> Path:
    """The local copy of OWNER/NAME/FILE or OWNER/NAME@REVISION/FILE, fetched unless cached; raises ModelError."""
    name = f"storageUri hf://{address}"
    owner, model, file = [*address.split("/", 2), "", ""][:3]
    if not file.endswith(SUFFIX) or not owner or not model:
        raise ModelError(f"{name}: write hf://OWNER/NAME/FILE{SUFFIX} or hf://OWNER/NAME@COMMIT/FILE{SUFFIX}")
    repository = _repository(f"{owner}/{model}", limits, name)
    with _errors(name, limits):
        path = repository.fetch(file)
    repository.warn_unless_pinned(path)
    enforce_bound()
    return path


def fetch_repository(address: str, limits: FetchLimits) -> Path:
    """The local copy of a model's repository, OWNER/NAME or OWNER/NAME@REVISION: configuration, tokenizer and weights.

    The configuration is fetched last: a cached revision that has it is complete. Raises ModelError as of
    ``fetch_from_hub``, or if a file is missing or the folder is too large.
    """
    name = f"storageUri hf://{address}"
    newest = _repository(address, limits, name)
    with _errors(name, limits):
        pinned = newest if newest.pinned else replace(newest, revision=newest.look_up(files.CONFIG_FILE).commit_hash)
        index = pinned.fetch_optional(files.INDEX_FILE)
        weights = (files.SINGLE_FILE,) if index is None else files.referenced_files(index.read_bytes(), name)
        files.require_total((pinned.look_up(file).file_size or 0 for file in weights), limits, name)
        optional = [pinned.fetch_optional(file) for file in files.OPTIONAL_FILES]
        paths = [path for path in optional if path is not None]
        paths += [*(pinned.fetch(file) for file in weights), newest.fetch(files.CONFIG_FILE)]
    files.require_total((path.stat().st_size for path in paths), limits, name)
    if len({path.parent for path in paths}) != 1:
        raise ModelError(f"{name}: it was replaced while it was fetched; fetch it again")
    newest.warn_unless_pinned(paths[-1])
    enforce_bound()
    return paths[-1].parent


def snapshot_name(path: Path) -> str:
    """Commit of a fetched folder, or commit and file of a fetched file."""
    start = max(index for index, part in enumerate(path.parts) if _COMMIT.fullmatch(part))
    return "/".join(path.parts[start:])


def require_reachable(address: str) -> None:
    """Raise ModelError if nothing of a repository is cached and the Hub cannot be reached; `address` as above."""
    name = f"storageUri hf://{address}"
    repository = _repository("/".join(address.split("/")[:2]), files.DEFAULT_LIMITS, name)
    if not any(hub_folder(repository.id).glob("*/snapshots/*")):
        _connect(repository.hub.constants.ENDPOINT, name)


def _connect(endpoint: str, name: str) -> None:
    """Connect to the Hub, a mirror of it, or the proxy to it; raises HubUnreachable."""
    if problem := _connection_problem(endpoint, int(time.monotonic() / _CONNECTION_SECONDS)):
        correction = "set HF_ENDPOINT to a mirror that can be reached, or give the path of a local copy"
        raise HubUnreachable(f"{name}: {problem}; {correction}")


@lru_cache(maxsize=1)
def _connection_problem(endpoint: str, _period: int) -> str:
    url = urlsplit(endpoint)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    target = url if proxy is None else urlsplit(proxy)
    host, port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
    try:
        _within(_CONNECT_SECONDS, lambda: socket.create_connection((host, port), _CONNECT_SECONDS).close())
    except OSError as error:  # TimeoutError is one
        reason = error.strerror or f"no response in {_CONNECT_SECONDS:g} s"
        return f"{'' if proxy is None else 'the proxy '}{host}:{port} cannot be reached ({reason})"
    return ""


def _repository(address: str, limits: FetchLimits, name: str) -> "_Repository":
    """The repository of an address, OWNER/NAME or OWNER/NAME@REVISION; ModelError if the revision is invalid."""
    repository, at, revision = address.partition("@")
    if at and not _REVISION.fullmatch(revision):
        raise ModelError(f"{name}: {revision!r} is not a revision; give a commit, 40 hexadecimal digits, or a tag")
    try:
        hub = import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise ModelError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error
    return _Repository(hub, repository, revision or None, limits, name)


@contextlib.contextmanager
def _errors(name: str, limits: FetchLimits) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError(f"{name}: no response in {limits.total_seconds:g} s; is the Hub overloaded?") from error
    except Exception as error:
        raise ModelError(f"{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository on the Hub; every method raises whatever the client does."""

    hub: Any
    id: str
    revision: str | None
    """A commit, branch or tag; None for the default branch."""
    limits: FetchLimits
    name: str
    """In messages."""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def warn_unless_pinned(self, path: Path) -> None:
        """Log that the content may change, and how to pin it; the client's cache path contains the commit."""
        if not self.pinned:
            commit = snapshot_name(path).partition("/")[0]
            log.warning("%s: not pinned: it is commit %s now; append @%s to OWNER/NAME", self.name, commit, commit)

    def look_up(self, file: str) -> Any:
        """The client's record of a file, with its commit and size, without downloading the file."""
        return self._download(file, dry_run=True)

    def fetch(self, file: str) -> Path:
        size_bytes = self.look_up(file).file_size
        if size_bytes is None:
            raise ModelError(f"{self.name}: the Hub does not state its size; download it and give its path")
        files.require_size(size_bytes, self.limits, self.name)
        path = Path(self._download(file))
        files.require_size(path.stat().st_size, self.limits, self.name)  # it may have been replaced meanwhile
        return path

    def fetch_optional(self, file: str) -> Path | None:
        """As ``fetch``, at a commit; None if the commit has no such file, or had none when it was cached."""
        record = self._cached(file)
        if record is not None:
            return Path(record) if isinstance(record, str) else None
        errors = import_module("huggingface_hub.errors")
        try:
            return self.fetch(file)
        except errors.RemoteEntryNotFoundError:
            return None
        except (errors.LocalEntryNotFoundError, HubUnreachable):  # the Hub is unavailable
            if self._cached(files.CONFIG_FILE) is None:
                raise
            return None

    def _cached(self, file: str) -> object:
        """Path of a cached file, the client's mark of a file that does not exist, or None if neither is known."""
        folder = hub_folder(self.id)
        return self.hub.try_to_load_from_cache(self.id, file, cache_dir=folder, revision=self.revision)

    def _download(self, file: str, **options: Any) -> Any:
        """Call the client; if the Hub is unavailable or no longer has the file, for the cached file."""
        options |= {"cache_dir": hub_folder(self.id), "revision": self.revision, "etag_timeout": _REQUEST_SECONDS}
        call = partial(self.hub.hf_hub_download, self.id, file, **options)
        try:
            if not self.pinned or self._cached(file) is None:
                _connect(self.hub.constants.ENDPOINT, self.name)
            return _within(self.limits.total_seconds, call)
        except Exception:
            with contextlib.suppress(Exception):  # the client has several exceptions for a missing file
                return call(local_files_only=True)
            raise


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Run a call with a timeout; raises TimeoutError, in which case the call continues in its thread.

    The client has no timeout of its own and threads cannot be stopped; without weights the process ends soon anyway.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  (raised to the caller)
            result.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return result.result(seconds)
