"""Every decision on a line of its own, in a file that never outgrows its bound."""

from pathlib import Path

from trimtab_pipelines.jsonl import JsonLinesFile
from trimtab_pipelines.plan import PipelinePlan

MAX_BYTES = 32 * 2**20


class DecisionLog:
    """Appends decisions; when full, forgets the older half."""

    def __init__(self, path: Path, most_bytes: int = MAX_BYTES) -> None:
        self._lines = JsonLinesFile(path, most_bytes)

    def append(self, plan: PipelinePlan) -> None:
        """Write one decision; raises OSError where the disk refuses it."""
        self._lines.append(plan.model_dump_json(by_alias=True, exclude_none=True))
