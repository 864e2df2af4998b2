"""Fetched weights on disk, shared by all pods of a node: found by digest or content, written in one step, bounded.

Where the pods are several tenants' (CACHE_TENANT_VARIABLE), only files with a digest are shared, each within its
tenant: what else is fetched lies in a folder of this pod's own.

Pods that want the same file at once wait for the first of them to fetch it; what one that dies leaves of it goes. Where
the files together outgrow the bound, those unused for longest go; a file in use stays readable to whoever has it open.
What a hub's client keeps of a repository is a folder, and counts and goes as one file does.
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
"""Used more recently than this, a file is not taken away: somebody may be about to open it."""
_FETCHING, _FOLDERS, _HUB = ".fetching-", ".folders", "hf"
log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where fetched weights are kept: $TRIMTAB_WEIGHTS_CACHE, else `weights` in $TRIMTAB_CACHE or ~/.cache/trimtab."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab") / "weights"


def tenant() -> str:
    """Whose weights these are, where the cache is several tenants'; else nothing."""
    return os.environ.get(CACHE_TENANT_VARIABLE, "")


def own_folder() -> Path:
    """Where fetched weights are kept that nobody else may be given unseen."""
    return Path(tempfile.gettempdir()) / "trimtab-weights" if tenant() else cache_folder()


def hub_folder(repository: str) -> Path:
    """Make a folder for what a hub's client keeps of a repository (OWNER/NAME): an entry of the own folder, used now.

    Raises:
        OSError: it cannot be made.
    """
    path = own_folder() / _HUB / repository.replace("/", "--")
    path.mkdir(parents=True, exist_ok=True)
    _touch(path)
    return path


def keep_bound() -> None:
    """Let the entries of the own folder go that were unused for longest, where together they outgrow the bound."""
    shrink(own_folder(), _bound_bytes())


def kept(
    name: str,
    is_good: Callable[[Path], bool],
    write: Callable[[BinaryIO], None],
    wait_seconds: float,
    folder: Path | None = None,
) -> Path:
    """The cached file of that name, written first where it is missing or no good.

    Args:
        name: of the file; the same for the same content.
        is_good: whether a file found may be used.
        write: writes the content.
        wait_seconds: how long to wait for another process that writes it.
        folder: None means the one that all share.

    Raises:
        ModelError: the cache cannot be written, or another process takes too long.
    """
    path = (folder or cache_folder()) / name
    if _usable(path, is_good):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, wait_seconds):
            if not _usable(path, is_good):
                _write(path, write)
    except OSError as error:
        raise ModelError(f"the weights cache {path.parent} cannot be used: {error}; set {CACHE_VARIABLE}") from error
    shrink(path.parent, _bound_bytes())
    return path


def linked(files: Mapping[str, Path]) -> Path:
    """A folder in which cached files have names of their own, made in one step; the same for the same files.

    Raises:
        ModelError: it cannot be made, or one of them was taken away meanwhile.
    """
    for file, path in files.items():
        if not path.is_file():
            raise ModelError(f"{file} left the weights cache while others were fetched; set {BOUND_VARIABLE} higher")
    told = "|".join(f"{file}={path}" for file, path in sorted(files.items()))
    folder = own_folder() / _FOLDERS / hashlib.sha256(told.encode()).hexdigest()[:32]
    try:
        if not folder.is_dir():
            _link(files, folder)
    except OSError as error:
        raise ModelError(f"the weights cache {own_folder()} cannot be used: {error}; set {CACHE_VARIABLE}") from error
    return folder


def _link(files: Mapping[str, Path], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_FETCHING, dir=folder.parent) as made:
        whole = Path(made) / folder.name
        whole.mkdir()
        for file, path in files.items():
            (whole / file).symlink_to(path.resolve())
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process has not made it meanwhile
                raise


def shrink(folder: Path, bound_bytes: int) -> None:
    """Remove what nobody fetches to its end any more, then the files unused for longest until the rest is in the bound.

    What is being fetched counts, and stays.
    """
    excess = sum(_unfinished_bytes(path) for path in folder.glob(f"{_FETCHING}*")) - bound_bytes
    entries = list(_entries(folder))
    excess += sum(size for _, size, _ in entries)
    for used_at, size, path in sorted(entries):
        if excess <= 0 or time.time() - used_at < FRESH_SECONDS:
            return
        with contextlib.suppress(OSError):  # what cannot be removed here keeps nothing from loading
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            excess -= size
            log.info("%s: removed, unused since %s", path, time.ctime(used_at))


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """What may be removed: when it was used last, its bytes, where it is."""
    for path in folder.glob("[!.]*"):
        for status in _status(path):
            if stat.S_ISREG(status.st_mode):
                yield status.st_mtime, status.st_size, path
    for path in folder.glob(f"{_HUB}/[!.]*"):
        for status in _status(path):
            yield status.st_mtime, _repository_bytes(path), path


def _repository_bytes(path: Path) -> int:
    """What a repository takes; nothing once another replica has begun to remove it."""
    with contextlib.suppress(OSError):
        inner = (one for entry in path.rglob("*") if not entry.is_symlink() for one in _status(entry))
        return sum(one.st_size for one in inner if stat.S_ISREG(one.st_mode))
    return 0


def _unfinished_bytes(path: Path) -> int:
    """The size of a file that is being fetched; none of one that nobody writes any more, which is removed."""
    for status in _status(path):
        if time.time() - status.st_mtime < FRESH_SECONDS:  # earlier releases write without this lock
            return status.st_size
        with contextlib.suppress(OSError), _lock(path.with_name(path.name.removeprefix(_FETCHING))) as lock:
            if _is_ours(lock):
                path.unlink(missing_ok=True)
                log.info("%s: removed, nobody fetches it since %s", path, time.ctime(status.st_mtime))
                return 0
        return status.st_size
    return 0


def _usable(path: Path, is_good: Callable[[Path], bool]) -> bool:
    if not path.is_file() or not is_good(path):
        return False
    _touch(path)
    return True


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that others fill may be read-only here
        os.utime(path)


def _write(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file in one step, in the place of what a process that died has left of it; the lock is held."""
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
def _alone(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the right to write this file; the system takes it back from a process that dies."""
    with _lock(path) as lock:
        give_up = time.monotonic() + wait_seconds
        while not _is_ours(lock):
            if time.monotonic() > give_up:
                raise ModelError(
                    f"{path}: another process has been fetching it for {wait_seconds:g} s; is the store slow?"
                )
            time.sleep(0.1)
        yield


def _lock(path: Path) -> BinaryIO:
    """What a file is locked by for whoever writes it."""
    return path.with_name(f".{path.name}.lock").open("wb")


def _is_ours(lock: BinaryIO) -> bool:
    """Whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _status(path: Path) -> Iterator[os.stat_result]:
    """The status of a file; none where it is gone by now."""
    with contextlib.suppress(OSError):
        yield path.stat()


def _bound_bytes() -> int:
    written = os.environ.get(BOUND_VARIABLE)
    if not written:
        return DEFAULT_BOUND_BYTES
    if not written.isdecimal():
        raise ModelError(f"{BOUND_VARIABLE} is {written!r}; write a number of bytes")
    return int(written)
