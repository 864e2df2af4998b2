"""Folder of a run, locked while the run lasts so that no other run overwrites it."""

import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.local.profile_cache import cache_folder
from trimtab.local.supervisor import MARK, MARK_FILE, OWN_FOLDERS, is_marked
from trimtab.run_record import is_record
from trimtab_pipelines.documents import DocumentError

LOCK_FILE = ".lock"


def reports_folder() -> Path:
    return cache_folder() / "reports"


@dataclass(slots=True)
class RunFolder:
    """Folder of one run: the requested one, which is kept, or a temporary one, which is removed.

    The kernel releases its lock when the process ends.
    """

    requested: Path | None = None
    path: Path = field(init=False)
    _lock: int = -1

    def __enter__(self) -> Path:
        """Create and lock the folder.

        Raises DocumentError if another run uses it, it holds files of no run, or it cannot be created.
        """
        self.path = self.requested or Path(tempfile.mkdtemp(prefix="trimtab-"))
        try:
            if self.requested is not None and not _may_overwrite(self.path):
                raise DocumentError(
                    f"--folder {self.path} holds files that are not a run's; give a folder that is empty, missing or "
                    "of an earlier run"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire_lock(self.path)
        except OSError as error:
            raise DocumentError(f"{self.path} cannot be a run folder: {error.strerror}") from error
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.requested is None:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)  # the file stays: removing it would allow two holders of the lock


def _may_overwrite(folder: Path) -> bool:
    """Whether a folder is missing, empty, or of an earlier run and without folders that the run did not create."""
    if not folder.exists():
        return True
    if all(path.name == LOCK_FILE and path.lstat().st_size == 0 for path in folder.iterdir()):
        return True  # the disk was full when a run began
    subfolders = [folder / name for name in OWN_FOLDERS if os.path.lexists(folder / name)]
    return (is_marked(folder / LOCK_FILE) or is_record(folder)) and all(
        is_marked(subfolder / MARK_FILE) and not subfolder.is_symlink() for subfolder in subfolders
    )


def _acquire_lock(folder: Path) -> int:
    """Lock a folder, write the holder into the lock file and return its file descriptor."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 200).removeprefix(MARK).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise DocumentError(
            f"{folder} is used by another run: {holder}. Give another --folder, or stop that run first"
        ) from None
    content = MARK + f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
    os.pwrite(lock, content, 0)
    os.truncate(lock, len(content))
    return lock
