"""Shell: reads the plan and the endpoints from their files and follows every change of them.

The files are replaced in one step by their writers; one that is broken, or does not fit the pipeline, is logged and
counted, and the last good one stays in force.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trimtab_pipelines.documents import DocumentError, load_endpoints, load_published_plan
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.plan_validation import validate_plan
from trimtab_router.router import Router
from trimtab_router.watchers.file_changes import FileStamps, changes

log = logging.getLogger(__name__)

Document = TypeVar("Document", PipelinePlan, Endpoints)


class FileWatcher:
    """Applies plan and endpoints to a router whenever their files change."""

    def __init__(self, router: Router, plan: Path, endpoints: Path | None) -> None:
        self._router = router
        self._plan_path = plan.resolve()
        self._endpoints_path = endpoints.resolve() if endpoints else None
        self._stamps = FileStamps()

    def read(self) -> None:
        """Read what changed since the last time and apply it."""
        pipeline = self._router.pipeline
        plan = self._load(self._plan_path, lambda path: validate_plan(load_published_plan(path), pipeline))
        if plan is not None:
            self._router.apply_plan(plan)
            log.info("plan %d is in force", plan.spec.generation)
        if self._endpoints_path is None:
            return
        endpoints = self._load(self._endpoints_path, load_endpoints)
        if endpoints is not None:
            self._router.apply_endpoints(endpoints)

    async def watch(self) -> None:
        """Follow both files for ever; they need not exist yet, their folders must."""
        folders = {path.parent for path in (self._plan_path, self._endpoints_path) if path is not None}
        async for _ in changes(*folders):
            self.read()

    def _load(self, path: Path, load: Callable[[Path], Document]) -> Document | None:
        """What the file says now; None where that is nothing new or nothing good."""
        if not self._stamps.changed(path):
            return None
        try:
            return load(path)
        except DocumentError as error:
            log.warning("%s; the last good one stays in force", error)
            self._router.metrics.broken_file(path.name)
            return None
