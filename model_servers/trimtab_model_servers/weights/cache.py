"""Weights cache on disk, shared by all pods of a node: keyed by digest or content, written atomically, bounded.

If pods belong to several tenants (CACHE_TENANT_VARIABLE), only files with a digest are shared, each within its tenant;
other downloads are in a private folder of the pod.

Processes that need the same file wait for the first one to fetch it; partial files of processes that died are removed.
Above the bound, the least recently used files are evicted; processes that have one open can still read it. A Hugging
Face Hub repository is one entry, a folder.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.model_spec import CACHE_TENANT_VARIABLE

CACHE_VARIABLE = "TRIMTAB_WEIGHTS_CACHE"
BOUND_VARIABLE = "TRIMTAB_WEIGHTS_CACHE_BYTES"
DEFAULT_BOUND_BYTES = 64 * 2**30
FRESH_SECONDS = 900.0
"""Entries used more recently than this are not evicted: a process may be about to open them."""
_FETCHING, _FOLDERS, _HUB = ".fetching-", ".folders", "hf"
log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The shared cache: $TRIMTAB_WEIGHTS_CACHE, else `weights` in $TRIMTAB_CACHE or ~/.cache/trimtab."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab") / "weights"


def tenant() -> str:
    """The tenant of this pod in a cache of several tenants; else empty."""
    return os.environ.get(CACHE_TENANT_VARIABLE, "")


def private_folder() -> Path:
    """Folder for downloads that other tenants must not share."""
    return Path(tempfile.gettempdir()) / "trimtab-weights" if tenant() else cache_folder()


def hub_folder(repository: str) -> Path:
    """Create the private folder of a Hub repository (OWNER/NAME), and mark it as used; raises OSError."""
    path = private_folder() / _HUB / repository.replace("/", "--")
    path.mkdir(parents=True, exist_ok=True)
    _touch(path)
    return path


def enforce_bound() -> None:
    """Evict the least recently used entries of the private folder above the bound."""
    evict(private_folder(), _bound_bytes())


def cached_file(
    name: str,
    is_valid: Callable[[Path], bool],
    write: Callable[[BinaryIO], None],
    wait_seconds: float,
    folder: Path | None = None,
) -> Path:
    """The cached file of a name, written first if it is missing or invalid; in the shared folder unless one is given.

    The name is the same for the same content. ``wait_seconds`` bounds the wait for another process that writes it.
    Raises ModelError if the cache cannot be written, or that process takes too long.
    """
    path = (folder or cache_folder()) / name
    if _usable(path, is_valid):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path, wait_seconds):
            if not _usable(path, is_valid):
                _write(path, write)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    evict(path.parent, _bound_bytes())
    return path


def linked_folder(files: Mapping[str, Path]) -> Path:
    """A folder of links to cached files, the same for the same files; ModelError if a file was evicted meanwhile."""
    for file, path in files.items():
        if not path.is_file():
            raise ModelError(
                f"{file} was evicted from the weights cache during the download; increase {BOUND_VARIABLE}"
            )
    key = "|".join(f"{file}={path}" for file, path in sorted(files.items()))
    folder = private_folder() / _FOLDERS / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        if not folder.is_dir():
            link_files(files, folder)
    except OSError as error:
        raise _unusable(private_folder(), error) from error
    return folder


def _unusable(folder: Path, error: OSError) -> ModelError:
    return ModelError(f"the weights cache {folder} cannot be used: {error}; set {CACHE_VARIABLE}")


def link_files(files: Mapping[str, Path], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_FETCHING, dir=folder.parent) as temporary:
        complete = Path(temporary) / folder.name
        complete.mkdir()
        for file, path in files.items():
            (complete / file).symlink_to(path.resolve())
        try:
            complete.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has created it meanwhile
                raise


def evict(folder: Path, bound_bytes: int) -> None:
    """Remove abandoned partial files, then evict the least recently used entries; files in progress count and stay."""
    excess = sum(_unfinished_bytes(path) for path in folder.glob(f"{_FETCHING}*")) - bound_bytes
    entries = list(_entries(folder))
    excess += sum(size for _, size, _ in entries)
    for used_at, size, path in sorted(entries):
        if excess <= 0 or time.time() - used_at < FRESH_SECONDS:
            return
        with contextlib.suppress(OSError):  # a file that cannot be removed does not prevent loading
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            excess -= size
            log.info("%s: removed, unused since %s", path, time.ctime(used_at))


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Evictable entries: time of last use, bytes, path."""
    for path in folder.glob("[!.]*"):
        status = file_status(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            yield status.st_mtime, status.st_size, path
    for path in folder.glob(f"{_HUB}/[!.]*"):
        status = file_status(path)
        if status is not None:
            yield status.st_mtime, _repository_bytes(path), path


def _repository_bytes(path: Path) -> int:
    """Size of a repository; 0 if another replica is removing it."""
    with contextlib.suppress(OSError):
        statuses = [file_status(entry) for entry in path.rglob("*") if not entry.is_symlink()]
        return sum(status.st_size for status in statuses if status is not None and stat.S_ISREG(status.st_mode))
    return 0


def _unfinished_bytes(path: Path) -> int:
    """Size of a partial file; 0 if its writer has died, in which case the file is removed."""
    status = file_status(path)
    if status is None:
        return 0
    if time.time() - status.st_mtime >= FRESH_SECONDS:  # a fresh one may be written without a lock
        with contextlib.suppress(OSError), _lock(path.with_name(path.name.removeprefix(_FETCHING))) as lock:
            if _try_lock(lock):
                path.unlink(missing_ok=True)
                log.info("%s: removed, abandoned since %s", path, time.ctime(status.st_mtime))
                return 0
    return status.st_size


def _usable(path: Path, is_valid: Callable[[Path], bool]) -> bool:
    if not path.is_file() or not is_valid(path):
        return False
    _touch(path)
    return True


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(path)


def _write(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file atomically, replacing a partial file of a process that died; the lock is held."""
    temporary = path.with_name(f"{_FETCHING}{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            write(file)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock to write this file; the system releases it if the process dies."""
    with _lock(path) as lock:
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise ModelError(
                    f"{path}: another process has been fetching it for {wait_seconds:g} s; is the store slow?"
                )
            time.sleep(0.1)
        yield


def _lock(path: Path) -> BinaryIO:
    return path.with_name(f".{path.name}.lock").open("wb")


def _try_lock(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_status(path: Path) -> os.stat_result | None:
    """Status of a file; None if it does not exist."""
    try:
        return path.stat()
    except OSError:
        return None


def _bound_bytes() -> int:
    bound = os.environ.get(BOUND_VARIABLE)
    if not bound:
        return DEFAULT_BOUND_BYTES
    if not bound.isdecimal():
        raise ModelError(f"{BOUND_VARIABLE} is {bound!r}; set a number of bytes")
    return int(bound)
