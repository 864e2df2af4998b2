"""Shell: every decision on a line of its own, in a file that never outgrows its bound."""

import os
from pathlib import Path

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.plan import PipelinePlan

MOST_BYTES = 32 * 2**20


class Journal:
    """Appends decisions; when full, forgets the older half."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_broken_end()

    def append(self, plan: PipelinePlan) -> None:
        """Write one decision."""
        line = plan.model_dump_json(by_alias=True, exclude_none=True) + "\n"
        # One write of one line to a file opened for appending: a crash leaves whole lines and at most one broken end.
        with self._path.open("ab") as file:
            file.write(line.encode())
        if self._path.stat().st_size > self._most_bytes:
            lines = self._path.read_text().splitlines(keepends=True)
            write_atomically(self._path, "".join(lines[len(lines) // 2 :]))

    def _drop_broken_end(self) -> None:
        """Cut what an earlier crash left of a line."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self._path, content.rfind(b"\n") + 1)
