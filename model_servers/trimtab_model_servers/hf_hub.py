"""Weights from a hub, by its own client, huggingface_hub, which keeps them in a folder for each repository as it likes.

A name may end in a revision. One that is a commit pins what is served: it can never be anything else, and what is here
of it is not asked for again. Of any other the newest commit is taken, and the log says which, so that it can be pinned.

Where the hub cannot be asked, what was fetched of that file before serves; where nothing was, it is asked again
for some seconds.
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

from trimtab_model_servers.cache import hub_folder, keep_bound
from trimtab_model_servers.download_limits import SUFFIX, FetchLimits, require_size
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    OPTIONAL_FILES,
    SINGLE_FILE,
    TOKENIZER_FILE,
    referenced_files,
    require_total,
)
from trimtab_pipelines.backoff import backoff

_ASKING_SECONDS = 10.0
_ASKED_AGAIN, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5, 0.2, 10.0
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_COMMIT, _REVISION = re.compile(r"[0-9a-f]{40}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def fetch_from_hub(address: str, limits: FetchLimits) -> Path:
    """The local copy of a hub's file, downloading it unless the cache has what the hub has now.

    Args:
        address: OWNER/NAME/FILE or OWNER/NAME@REVISION/FILE.
        limits: bounds of what is fetched.

    Raises:
        ModelError: no such file, too large, too slow, or no client of the hub.
    """
    name = f"storageUri hf://{address}"
    owner, model, file = [*address.split("/", 2), "", ""][:3]
    if not file.endswith(SUFFIX) or not owner or not model:
        raise ModelError(f"{name}: write hf://OWNER/NAME/FILE{SUFFIX} or hf://OWNER/NAME@COMMIT/FILE{SUFFIX}")
    repository, revision = _parted(f"{owner}/{model}", name)
    source = _Source(_client(name), repository, file, limits, name, revision)
    path = _asked(name, limits, source.find)
    if not source.pinned:
        _tell_unpinned(name, path)
    keep_bound()
    return path


def fetch_repository(address: str, limits: FetchLimits) -> Path:
    """The local copy of a model's repository, of one revision: configuration, tokenizer and the weights of its index.

    The configuration comes last: what the hub's client calls the newest revision is whole.

    Args:
        address: OWNER/NAME or OWNER/NAME@REVISION.
        limits: bounds of what is fetched.

    Raises:
        ModelError: as of ``fetch_from_hub``; or a file is not there, or all together are too large.
    """
    name = f"storageUri hf://{address}"
    repository, revision = _parted(address, name)
    newest = _Source(_client(name), repository, CONFIG_FILE, limits, name, revision)
    pinned = newest if newest.pinned else replace(newest, revision=_asked(name, limits, newest.commit) or revision)
    index = _asked(name, limits, replace(pinned, file=INDEX_FILE).find_unless_absent)
    files = (SINGLE_FILE,) if index is None else referenced_files(index.read_bytes(), name)
    sources = [replace(pinned, file=file) for file in (*files, TOKENIZER_FILE)]
    if pinned.pinned:
        require_total((_asked(name, limits, source.bytes_to_be) for source in sources), limits, name)
    others = [_asked(name, limits, replace(pinned, file=file).find_unless_absent) for file in OPTIONAL_FILES]
    paths = [path for path in others if path is not None]
    paths += [_asked(name, limits, source.find) for source in (*sources, newest)]
    require_total((path.stat().st_size for path in paths), limits, name)
    if len({path.parent for path in paths}) != 1:
        raise ModelError(f"{name}: it was replaced while it was fetched; fetch it anew")
    if not newest.pinned:
        _tell_unpinned(name, paths[-1])
    keep_bound()
    return paths[-1].parent


def _parted(address: str, name: str) -> tuple[str, str | None]:
    """A repository and the revision asked for; raises ModelError where that cannot be one."""
    repository, at, revision = address.partition("@")
    if at and not _REVISION.fullmatch(revision):
        raise ModelError(f"{name}: {revision!r} is no revision; write a commit, 40 hexadecimal digits, or a tag")
    return repository, revision or None


def _tell_unpinned(name: str, path: Path) -> None:
    """Say that another content may be served tomorrow, and how to keep today's; a client keeps it under its commit."""
    commit = next((part for part in reversed(path.parts) if _COMMIT.fullmatch(part)), None)
    cure = "write its commit behind an @" if commit is None else f"it is commit {commit} now; write @{commit}"
    log.warning("%s: not pinned: %s behind OWNER/NAME to be served no other", name, cure)


def _client(name: str) -> Any:
    try:
        return import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise ModelError(f"{name} needs huggingface_hub: pip install huggingface_hub") from error


def _asked(name: str, limits: FetchLimits, act: "Callable[[], Result]") -> "Result":
    """What a hub is asked for, within the time that a file may take; raises ModelError."""
    try:
        return _within(limits.total_seconds, act)
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError(f"{name}: it did not come in {limits.total_seconds:g} s; is the hub overloaded?") from error
    except Exception as error:
        raise ModelError(f"{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Source:
    """One file of a hub, as its client is asked for it; every method raises whatever the client does."""

    hub: Any
    repository: str
    file: str
    limits: FetchLimits
    name: str
    revision: str | None = None
    """A commit, or what the hub calls one by; None is the newest."""

    @property
    def pinned(self) -> bool:
        """Whether it is of a commit, whose files never change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def commit(self) -> str | None:
        """The newest revision; None where the hub is away, and what was fetched before is to serve."""
        try:
            return self._commit()
        except Exception as error:  # noqa: BLE001  (as of find)
            try:
                self._fetched_before(hub_folder(self.repository))
            except Exception:  # noqa: BLE001  (nothing was fetched yet: the hub is all there is)
                return _asked_again(self._commit, error)
            return None

    def _commit(self) -> str:
        commit: str | None = self._told().commit_hash
        if commit is None:
            raise ModelError(f"{self.name}: the hub does not tell its revision; fetch it yourself and name its path")
        return commit

    def find_unless_absent(self) -> Path | None:
        """As ``find``; None where the repository has no such file, or had none when it was fetched before."""
        folder = hub_folder(self.repository)
        try:
            return self._fetched_before(folder)
        except Exception:  # noqa: BLE001  (whatever it has for what is not there)
            if not self.pinned or self._known_absent(folder):
                return None
        try:
            return self.find()
        except Exception as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                with contextlib.suppress(Exception):  # asked for what is not there, its client notes that
                    self._kept(folder, etag_timeout=_ASKING_SECONDS)
            elif not self._whole_before():
                raise
            return None

    def _known_absent(self, folder: Path) -> bool:
        """Whether the hub has said before that its commit has no such file."""
        told = self.hub.try_to_load_from_cache(self.repository, self.file, cache_dir=folder, revision=self.revision)
        return told is not None and not isinstance(told, str)

    def _whole_before(self) -> bool:
        """Whether all of its repository was fetched before: what comes last is here."""
        try:
            replace(self, file=CONFIG_FILE)._fetched_before(hub_folder(self.repository))  # noqa: SLF001  (one of its own)
        except Exception:  # noqa: BLE001  (whatever the client has for what is not there)
            return False
        return True

    def find(self) -> Path:
        """Fetch it if it is small enough, or find the one that was fetched before."""
        folder = hub_folder(self.repository)
        if self.pinned:
            with contextlib.suppress(Exception):  # not here yet
                return self._small_enough(self._fetched_before(folder))
        try:
            size_bytes = self.size_bytes()
        except Exception as error:  # noqa: BLE001  (away, overloaded, refusing: the client has a class for each)
            try:
                path = self._fetched_before(folder)
            except Exception:  # noqa: BLE001  (the hub's own words say more than that the file is not here)
                path = self._fetched(folder, _asked_again(self.size_bytes, error))
        else:
            path = self._fetched(folder, size_bytes)
        return self._small_enough(path)

    def _small_enough(self, path: Path) -> Path:
        require_size(path.stat().st_size, self.limits, self.name)  # one replaced meanwhile, or fetched before
        return path

    def bytes_to_be(self) -> int:
        """Its size, of a commit: here where it is, else as the hub says."""
        with contextlib.suppress(Exception):  # not here yet
            return self._fetched_before(hub_folder(self.repository)).stat().st_size
        return self.size_bytes() or 0

    def size_bytes(self) -> int | None:
        """What the hub says its size is."""
        size_bytes: int | None = self._told().size
        return size_bytes

    def _told(self) -> Any:
        url = self.hub.hf_hub_url(self.repository, self.file, revision=self.revision)
        return self.hub.get_hf_file_metadata(url, timeout=_ASKING_SECONDS)

    def _fetched(self, folder: Path, size_bytes: int | None) -> Path:
        if size_bytes is None:
            raise ModelError(f"{self.name}: the hub does not tell its size; fetch it yourself and name its path")
        require_size(size_bytes, self.limits, self.name)
        return self._kept(folder, etag_timeout=_ASKING_SECONDS)

    def _fetched_before(self, folder: Path) -> Path:
        try:
            return self._kept(folder, local_files_only=True)
        except Exception:  # noqa: BLE001  (whatever it has for what is not there)
            return self._kept(folder.parent, local_files_only=True)  # where earlier releases had all repositories

    def _kept(self, folder: Path, **how: Any) -> Path:
        told = how | {"cache_dir": folder, "revision": self.revision}
        return Path(self.hub.hf_hub_download(self.repository, self.file, **told))


def _asked_again(ask: Callable[[], Result], error: Exception) -> Result:
    """What a hub answers that failed once: it is asked again with growing pauses, unless it refuses."""
    for pause_seconds in islice(backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS), _ASKED_AGAIN):
        if not _passes(error):
            break
        time.sleep(pause_seconds)
        try:
            return ask()
        except Exception as another:  # noqa: BLE001  (judged and raised below)
            error = another
    raise error


def _passes(error: Exception) -> bool:
    """Whether it may go well later: nobody answered, or a hub that is overloaded or broken."""
    status = _status(error)
    return status is None or status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _status(error: Exception) -> int | None:
    """What a hub answered; None where it did not."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _within(seconds: float, act: Callable[[], Result]) -> Result:
    """What an act gives; TimeoutError where it takes longer, and it then goes on until the process ends.

    The client has no bound of its own, and threads cannot be ended; a process whose weights do not come ends soon.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001  (whoever waits must learn of any failure)
            done.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return done.result(seconds)
