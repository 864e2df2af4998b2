"""Bounds on the logs of a run's processes, which append to them."""

from pathlib import Path

MAX_BYTES = 8 * 2**20
MAX_FILES = 200
"""Maximum of logs: every replica that was started has one."""


def trim_logs(folder: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Truncate logs above `max_bytes` to their newer half, in whole lines; keep the `max_files` modified last."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(len(logs) - max_files, 0)]:
        path.unlink(missing_ok=True)
    for path in logs[-max_files:]:
        if path.stat().st_size > max_bytes:
            _keep_newer_half(path, max_bytes)


def _keep_newer_half(path: Path, max_bytes: int) -> None:
    """Truncate in place, since a process appends to the file; a line appended meanwhile is lost."""
    with path.open("r+b") as file:
        file.seek(-max_bytes // 2, 2)
        newer = file.read()
        file.seek(0)
        file.write(newer[newer.find(b"\n") + 1 :])
        file.truncate()
