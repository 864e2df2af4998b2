"""Server processes that tests run."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_SECONDS = 20.0


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a program that writes to a log; stop it at the end, whether it likes to or not."""
    with log.open("wb") as into:
        process = subprocess.Popen(command, stdout=into, stderr=into, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
