"""File change detection by kernel notifications, and by a poll each second.

The poll covers file systems without notifications, and changes before the watch started. Paths in notifications are not
compared with ours: with symbolic links, a folder has several names.
"""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

from watchfiles import awatch

logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it logs every change of a folder

POLL_SECONDS = 1.0


class FileStamps:
    """Modification time, inode and size of files at the last check."""

    def __init__(self) -> None:
        self._stamps: dict[Path, tuple[int, int, int]] = {}

    def changed(self, path: Path) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        if self._stamps.get(path) == stamp:
            return False
        self._stamps[path] = stamp
        return True


async def changes(*folders: Path) -> AsyncIterator[None]:
    """Yield whenever files in the folders may have changed: first at once, then forever. The folders must exist."""
    yield
    period = int(POLL_SECONDS * 1000)
    async for _ in awatch(*folders, recursive=False, step=20, debounce=100, rust_timeout=period, yield_on_timeout=True):
        yield
