"""Weights from a hub, by its own client, huggingface_hub, which keeps them in a folder for each repository as it likes.

Where the hub cannot be asked, what was fetched of that file before serves; where nothing was, it is asked again
for some seconds.
"""

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
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.fetched import SUFFIX, FetchLimits, require_size
from trimtab_model_servers.folders import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TOKENIZER_FILE, named_by, require_total
from trimtab_pipelines.backoff import backoff

_ASKING_SECONDS = 10.0
_ASKED_AGAIN, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5, 0.2, 10.0
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
Result = TypeVar("Result")


def fetch_from_hub(address: str, limits: FetchLimits) -> Path:
    """The local copy of a hub's file, downloading it unless the cache has what the hub has now.

    Args:
        address: OWNER/NAME/FILE.
        limits: bounds of what is fetched.

    Raises:
        ModelError: no such file, too large, too slow, or no client of the hub.
    """
    name = f"storageUri hf://{address}"
    owner, model, file = [*address.split("/", 2), "", ""][:3]
    if not file.endswith(SUFFIX) or not owner or not model:
        raise ModelError(f"{name}: write hf://OWNER/NAME/FILE{SUFFIX}")
    source = _Source(_client(name), f"{owner}/{model}", file, limits, name)
    path = _asked(name, limits, source.find)
    keep_bound()
    return path


def fetch_repository(address: str, limits: FetchLimits) -> Path:
    """The local copy of a model's repository, of one revision: configuration, tokenizer and the weights of its index.

    The configuration comes last: what the hub's client calls the newest revision is whole.

    Args:
        address: OWNER/NAME.
        limits: bounds of what is fetched.

    Raises:
        ModelError: as of ``fetch_from_hub``; or a file is not there, or all together are too large.
    """
    name = f"storageUri hf://{address}"
    newest = _Source(_client(name), address, CONFIG_FILE, limits, name)
    pinned = replace(newest, revision=_asked(name, limits, newest.commit))
    index = _asked(name, limits, replace(pinned, file=INDEX_FILE).find_unless_absent)
    files = (SINGLE_FILE,) if index is None else named_by(index.read_bytes(), name)
    sources = [replace(pinned, file=file) for file in (*files, TOKENIZER_FILE)]
    if pinned.revision is not None:
        require_total((_asked(name, limits, source.size_bytes) or 0 for source in sources), limits, name)
    paths = [_asked(name, limits, source.find) for source in (*sources, newest)]
    require_total((path.stat().st_size for path in paths), limits, name)
    if len({path.parent for path in paths}) != 1:
        raise ModelError(f"{name}: it was replaced while it was fetched; fetch it anew")
    keep_bound()
    return paths[-1].parent


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
    """A commit; None is the newest."""

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
        try:
            return self._fetched_before(hub_folder(self.repository)) if self.revision is None else self.find()
        except Exception as error:
            if self.revision is None or _status(error) == HTTPStatus.NOT_FOUND:
                return None
            raise

    def find(self) -> Path:
        """Fetch it if it is small enough, or find the one that was fetched before."""
        folder = hub_folder(self.repository)
        try:
            size_bytes = self.size_bytes()
        except Exception as error:  # noqa: BLE001  (away, overloaded, refusing: the client has a class for each)
            try:
                path = self._fetched_before(folder)
            except Exception:  # noqa: BLE001  (the hub's own words say more than that the file is not here)
                path = self._fetched(folder, _asked_again(self.size_bytes, error))
        else:
            path = self._fetched(folder, size_bytes)
        require_size(path.stat().st_size, self.limits, self.name)  # one replaced meanwhile, or fetched before
        return path

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
