"""Weights from the Hugging Face Hub, by its client huggingface_hub, in the client's own cache layout.

A repository may have a revision. A commit pins the content: cached files of it are never requested again. For any other
revision the newest commit is used and logged, so that it can be pinned.

If the Hub is unavailable, a file that was fetched before is used; without one, the request is retried for some seconds.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.cache import enforce_bound, hub_folder
from trimtab_model_servers.weights.files import (
    CONFIG_FILE,
    INDEX_FILE,
    OPTIONAL_FILES,
    SINGLE_FILE,
    SUFFIX,
    TOKENIZER_FILE,
    FetchLimits,
    referenced_files,
    require_size,
    require_total,
)
from trimtab_pipelines.backoff import backoff

_REQUEST_SECONDS = 10.0
_RETRIES, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5, 0.2, 10.0
_TRANSIENT = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_COMMIT, _REVISION = re.compile(r"[0-9a-f]{40}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def fetch_from_hub(address: str, limits: FetchLimits) -> Path:
    """The local copy of OWNER/NAME/FILE or OWNER/NAME@REVISION/FILE, downloaded unless the cache is up to date.

    Raises ModelError if there is none, it is too large or slow, or huggingface_hub is missing.
    """
    name = f"storageUri hf://{address}"
    owner, model, file = [*address.split("/", 2), "", ""][:3]
    if not file.endswith(SUFFIX) or not owner or not model:
        raise ModelError(f"{name}: write hf://OWNER/NAME/FILE{SUFFIX} or hf://OWNER/NAME@COMMIT/FILE{SUFFIX}")
    repository, revision = _split_revision(f"{owner}/{model}", name)
    source = _Source(_client(name), repository, file, limits, name, revision)
    path = _request(name, limits, source.find)
    if not source.pinned:
        _warn_unpinned(name, path)
    enforce_bound()
    return path


def fetch_repository(address: str, limits: FetchLimits) -> Path:
    """The local copy of a model's repository, OWNER/NAME or OWNER/NAME@REVISION: configuration, tokenizer and weights.

    The configuration is fetched last: a cached revision that has it is complete.

    Raises:
        ModelError: as of ``fetch_from_hub``; or a file is missing, or the folder is too large.
    """
    name = f"storageUri hf://{address}"
    repository, revision = _split_revision(address, name)
    newest = _Source(_client(name), repository, CONFIG_FILE, limits, name, revision)
    pinned = newest if newest.pinned else replace(newest, revision=_request(name, limits, newest.commit) or revision)
    index = _request(name, limits, replace(pinned, file=INDEX_FILE).find_unless_absent)
    files = (SINGLE_FILE,) if index is None else referenced_files(index.read_bytes(), name)
    sources = [replace(pinned, file=file) for file in (*files, TOKENIZER_FILE)]
    if pinned.pinned:
        require_total((_request(name, limits, source.expected_bytes) for source in sources), limits, name)
    optional = [_request(name, limits, replace(pinned, file=file).find_unless_absent) for file in OPTIONAL_FILES]
    paths = [path for path in optional if path is not None]
    paths += [_request(name, limits, source.find) for source in (*sources, newest)]
    require_total((path.stat().st_size for path in paths), limits, name)
    if len({path.parent for path in paths}) != 1:
        raise ModelError(f"{name}: it was replaced while it was fetched; fetch it again")
    if not newest.pinned:
        _warn_unpinned(name, paths[-1])
    enforce_bound()
    return paths[-1].parent


def _split_revision(address: str, name: str) -> tuple[str, str | None]:
    """Split an address into repository and revision; raises ModelError if the revision is invalid."""
    repository, at, revision = address.partition("@")
    if at and not _REVISION.fullmatch(revision):
        raise ModelError(f"{name}: {revision!r} is not a revision; give a commit, 40 hexadecimal digits, or a tag")
    return repository, revision or None


def _warn_unpinned(name: str, path: Path) -> None:
    """Log that the content may change, and how to pin it; the client's cache path contains the commit."""
    commit = next((part for part in reversed(path.parts) if _COMMIT.fullmatch(part)), None)
    advice = "append @COMMIT" if commit is None else f"it is commit {commit} now; append @{commit}"
    log.warning("%s: not pinned: %s to OWNER/NAME", name, advice)


def _client(name: str) -> Any:
    try:
        return import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise ModelError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error


def _request(name: str, limits: FetchLimits, call: "Callable[[], Result]") -> "Result":
    """Call the Hub's client within the time limit of a file; raises ModelError."""
    try:
        return _within(limits.total_seconds, call)
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError(f"{name}: no response in {limits.total_seconds:g} s; is the Hub overloaded?") from error
    except Exception as error:
        raise ModelError(f"{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Source:
    """One file on the Hub; every method raises whatever the client does."""

    hub: Any
    repository: str
    file: str
    limits: FetchLimits
    name: str
    revision: str | None = None
    """A commit, branch or tag; None for the default branch."""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def commit(self) -> str | None:
        """The newest commit; None if the Hub is unavailable and a cached file can be used."""
        try:
            return self._commit()
        except Exception as error:  # noqa: BLE001  (as in find)
            return _retry(self._commit, error) if self._cached() is None else None

    def _commit(self) -> str:
        commit: str | None = self._metadata().commit_hash
        if commit is None:
            raise ModelError(f"{self.name}: the Hub does not state its commit; download it and give its path")
        return commit

    def find_unless_absent(self) -> Path | None:
        """As ``find``; None if the repository has no such file, or had none when it was cached."""
        cached = self._cached()
        if cached is not None or not self.pinned or self._known_absent():
            return cached
        try:
            return self.find()
        except Exception as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                with contextlib.suppress(Exception):  # the client records that the file does not exist
                    self._download(etag_timeout=_REQUEST_SECONDS)
            elif not self._is_complete():
                raise
            return None

    def _known_absent(self) -> bool:
        """Whether the client has recorded that the commit has no such file."""
        folder = hub_folder(self.repository)
        record = self.hub.try_to_load_from_cache(self.repository, self.file, cache_dir=folder, revision=self.revision)
        return record is not None and not isinstance(record, str)

    def _is_complete(self) -> bool:
        """Whether the whole repository is cached: the last file is."""
        return replace(self, file=CONFIG_FILE)._cached() is not None  # noqa: SLF001  (same class)

    def find(self) -> Path:
        cached = self._cached()
        if cached is None or not self.pinned:
            try:
                size_bytes = self.size_bytes()
            except Exception as error:  # noqa: BLE001  (the client has several exceptions for an unavailable Hub)
                if cached is None:
                    cached = self._fetch(_retry(self.size_bytes, error))
            else:
                cached = self._fetch(size_bytes)
        require_size(cached.stat().st_size, self.limits, self.name)  # it may have been replaced meanwhile
        return cached

    def expected_bytes(self) -> int:
        """Size of the cached file, else the size that the Hub states."""
        cached = self._cached()
        return (self.size_bytes() or 0) if cached is None else cached.stat().st_size

    def size_bytes(self) -> int | None:
        size_bytes: int | None = self._metadata().size
        return size_bytes

    def _metadata(self) -> Any:
        url = self.hub.hf_hub_url(self.repository, self.file, revision=self.revision)
        return self.hub.get_hf_file_metadata(url, timeout=_REQUEST_SECONDS)

    def _fetch(self, size_bytes: int | None) -> Path:
        if size_bytes is None:
            raise ModelError(f"{self.name}: the Hub does not state its size; download it and give its path")
        require_size(size_bytes, self.limits, self.name)
        return self._download(etag_timeout=_REQUEST_SECONDS)

    def _cached(self) -> Path | None:
        try:
            return self._download(local_files_only=True)
        except Exception:  # noqa: BLE001  (the client has several exceptions for a missing file)
            return None

    def _download(self, **options: Any) -> Path:
        arguments = options | {"cache_dir": hub_folder(self.repository), "revision": self.revision}
        return Path(self.hub.hf_hub_download(self.repository, self.file, **arguments))


def _retry(call: Callable[[], Result], error: Exception) -> Result:
    """Retry a failed request with exponential backoff, unless the Hub rejects it."""
    for pause_seconds in islice(backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS), _RETRIES):
        if not _is_transient(error):
            break
        time.sleep(pause_seconds)
        try:
            return call()
        except Exception as latest:  # noqa: BLE001  (raised below)
            error = latest
    raise error


def _is_transient(error: Exception) -> bool:
    """Whether a retry may succeed: no response, overload, or a server error."""
    status = _status(error)
    return status is None or status in _TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _status(error: Exception) -> int | None:
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


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
