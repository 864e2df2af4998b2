"""`FileWatcher`: applies the plan and the endpoints from files, at the start and at each change.

Writers replace the files atomically. An invalid file is logged and counted, and the last valid one stays in use.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trimtab_pipelines.documents import DocumentError, accept_plan, load_endpoints, load_published_plan
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_router.file_changes import FileStamps, changes
from trimtab_router.router import Router

log = logging.getLogger(__name__)

Document = TypeVar("Document", PipelinePlan, Endpoints)


def apply_plan(router: Router, plan: PipelinePlan) -> None:
    """Apply a valid plan. If it raises all the same, the previous one is applied again, and the watch goes on."""
    previous = router.plan
    try:
        router.apply_plan(plan)
    except Exception:
        log.exception("plan %d cannot be applied; the last one stays in use", plan.spec.generation)
        router.metrics.count_invalid_file(plan.kind)
        if previous is not None:
            router.apply_plan(previous)
    else:
        log.info("plan %d applied", plan.spec.generation)


class FileWatcher:
    """Applies plan and endpoints to a router when their files change."""

    def __init__(self, router: Router, plan: Path, endpoints: Path | None) -> None:
        self._router = router
        self._plan_path = plan.resolve()
        self._endpoints_path = endpoints.resolve() if endpoints else None
        self._stamps = FileStamps()

    def read(self) -> None:
        pipeline = self._router.pipeline
        plan = self._load(self._plan_path, lambda path: accept_plan(load_published_plan(path), pipeline))
        if plan is not None:
            apply_plan(self._router, plan)
        if self._endpoints_path is None:
            return
        endpoints = self._load(self._endpoints_path, load_endpoints)
        if endpoints is not None:
            self._router.apply_endpoints(endpoints)

    async def watch(self) -> None:
        """Watch both files forever. Their folders must exist."""
        folders = {path.parent for path in (self._plan_path, self._endpoints_path) if path is not None}
        async for _ in changes(*folders):
            self.read()

    def _load(self, path: Path, load: Callable[[Path], Document]) -> Document | None:
        if not self._stamps.changed(path):
            return None
        try:
            return load(path)
        except DocumentError as error:
            log.warning("%s; the last valid version stays in use", error)
            self._router.metrics.count_invalid_file(path.name)
            return None
