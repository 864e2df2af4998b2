"""The folder of one run: locked while the run goes on, so that no other takes its files away."""

import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.local.profile_cache import cache_folder
from trimtab.run_record import FACTS_FILE
from trimtab_pipelines.documents import DocumentError

LOCK_FILE = ".lock"


def reports_folder() -> Path:
    """Where the page of a run is left that asked for none: nothing is written into the working directory unasked."""
    return cache_folder() / "reports"


@dataclass(slots=True)
class RunFolder:
    """A folder for one run: the one asked for, kept, or a temporary one, removed in the end.

    The kernel holds the lock for this process, and lets it go however the process ends.
    """

    requested: Path | None = None
    path: Path = field(init=False)
    _lock: int = -1

    def __enter__(self) -> Path:
        """Take the folder.

        Raises:
            DocumentError: another run has it, it holds what no run left, or it cannot be one; nothing was touched.
        """
        self.path = self.requested or Path(tempfile.mkdtemp(prefix="trimtab-"))
        try:
            if self.requested is not None and not _free(self.path):
                raise DocumentError(
                    f"--folder {self.path} holds files that no run left there, and a run writes over its folder; "
                    "give one that is empty, missing, or of an earlier run"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
        except OSError as error:
            raise DocumentError(f"{self.path} cannot be the folder of a run: {error.strerror}") from error
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.requested is None:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)  # the file stays: who removes one that another has just opened lets two in


def _free(folder: Path) -> bool:
    """Whether a run may take what is in a folder away: there is nothing, or an earlier run left its mark there."""
    marked = any((folder / mark).exists() for mark in (LOCK_FILE, FACTS_FILE))
    return marked or not folder.exists() or not any(folder.iterdir())


def _locked(folder: Path) -> int:
    """Lock a folder and write down who has it; returns the lock's file descriptor."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 200).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise DocumentError(
            f"{folder} is the folder of a run that goes on: {holder}. Give another --folder, or stop that run first"
        ) from None
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    return lock
