"""Shell: keeps the logs of a run's processes bounded. They are written by others, in files opened for appending."""

from pathlib import Path

MAX_TASK_FILE_BYTES = 8 * 2**20
MOST_FILES = 200
"""Of processes that ended, those whose logs are kept: every replica that was ever started has one."""


def trim_logs(folder: Path, most_bytes: int = MAX_TASK_FILE_BYTES, most_files: int = MOST_FILES) -> None:
    """Cut each log that outgrew its bound to its newer half, whole lines; forget those written last longest ago."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(len(logs) - most_files, 0)]:
        path.unlink(missing_ok=True)
    for path in logs[-most_files:]:
        if path.stat().st_size > most_bytes:
            _keep_newer_half(path, most_bytes)


def _keep_newer_half(path: Path, most_bytes: int) -> None:
    """Write into the same file: whoever appends to it goes on after what stays. A line that comes meanwhile is lost."""
    with path.open("r+b") as file:
        file.seek(-most_bytes // 2, 2)
        kept = file.read()
        file.seek(0)
        file.write(kept[kept.find(b"\n") + 1 :])
        file.truncate()
