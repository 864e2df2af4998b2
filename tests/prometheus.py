"""Real Prometheus over samples that a test wrote to a folder."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.control_plane import tool
from tests.ports import held_port
from tests.processes import running


@contextmanager
def prometheus(folder: Path) -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    """Run it by the folder's prometheus.yml, keeping its data there; yield its URL, not ready yet, and its process."""
    own = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with held_port() as port:
        command = [tool("prometheus"), *own, f"--web.listen-address=127.0.0.1:{port}"]
        with running(command, folder / "log") as process:
            yield f"http://127.0.0.1:{port}", process
