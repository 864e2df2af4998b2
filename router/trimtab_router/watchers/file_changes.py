"""Shell: tells when files may have changed, and which have: by the kernel's word, and by a look each second beside it.

The look finds what file systems tell nothing of, and what changed before the kernel listened. No path that the kernel
names is compared with ours: where there are links, a folder has several names.
"""

from collections.abc import AsyncIterator
from pathlib import Path

from watchfiles import awatch

POLL_SECONDS = 1.0


class FileStamps:
    """What stood in files when they were looked at last, told by time, inode and size."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int, int]] = {}

    def changed(self, path: Path) -> bool:
        """Whether there is such a file, and another one than at the last look."""
        try:
            status = path.stat()
        except OSError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        if self._seen.get(path) == stamp:
            return False
        self._seen[path] = stamp
        return True


async def changes(*folders: Path) -> AsyncIterator[None]:
    """Yield whenever it is time to look at the files of folders, which exist: first at once; for ever."""
    yield
    period = int(POLL_SECONDS * 1000)
    async for _ in awatch(*folders, recursive=False, step=20, debounce=100, rust_timeout=period, yield_on_timeout=True):
        yield
