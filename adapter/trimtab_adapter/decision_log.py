"""`DecisionLog`: a bounded file with one decision per line."""

from pathlib import Path

from trimtab_pipelines.jsonl import JsonLinesFile
from trimtab_pipelines.plan import PipelinePlan

MAX_BYTES = 32 * 2**20


class DecisionLog:
    """Appends decisions; when full, drops the older half."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._lines = JsonLinesFile(path, max_bytes)

    def append(self, plan: PipelinePlan) -> None:
        """Append one decision; raises OSError if the write fails."""
        self._lines.append(plan.model_dump_json(by_alias=True, exclude_none=True))
