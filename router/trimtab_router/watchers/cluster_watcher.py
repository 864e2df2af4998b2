"""`ClusterWatcher`: watches a pipeline's plan and EndpointSlices through the Kubernetes API.

While the API server is unavailable, or a plan invalid, the last valid state stays in use. A router that starts
meanwhile uses the endpoints that the previous one stored; its probes find those that still serve.
"""

import asyncio
import logging
from pathlib import Path

from trimtab_kubernetes import Change, Cluster, list_and_watch
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.documents import DocumentError, load_endpoints, parse_plan, validate_plan
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.kubernetes_names import ADVISORY_LABEL, PIPELINE_LABEL
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.status import condition_of
from trimtab_router.envoy.overload_controller import write_if_possible
from trimtab_router.router import Router
from trimtab_router.watchers.endpoint_slices import endpoint_names, ready_endpoints
from trimtab_router.watchers.file_watcher import apply_plan

log = logging.getLogger(__name__)

PLAN, SLICES = "PipelinePlan", "EndpointSlice"
REWRITE_SECONDS = 10.0
"""Pause after endpoints could not be stored, as on a full disk."""


class ClusterWatcher:
    """Applies plans and endpoints from the cluster to a router; `stored` is the file of the last endpoints."""

    def __init__(self, router: Router, cluster: Cluster, namespace: str, stored: Path | None = None) -> None:
        self._router = router
        self._stored = stored
        self._changed = asyncio.Event()
        self._cluster = cluster
        self._namespace = namespace
        self._slices: dict[str, Object] = {}
        self._endpoints = Endpoints()
        self._synced = False
        self._replaced_plan: PipelinePlan | None = None
        self._apply_handle: asyncio.Handle | None = None

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._stored is not None:
                self._apply_stored(self._stored)
                tasks.create_task(self._store_endpoints(self._stored))
            tasks.create_task(self._watch_plan())
            tasks.create_task(self._watch_slices())

    def _apply_stored(self, file: Path) -> None:
        if file.exists():
            try:
                self._endpoints = load_endpoints(file)
            except DocumentError as error:
                log.warning("%s; endpoints are unknown until the API server responds", error)
            else:
                self._router.apply_endpoints(self._endpoints)

    async def _store_endpoints(self, file: Path) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await write_if_possible(file, self._endpoints.model_dump_json(by_alias=True, exclude_none=True)):
                self._changed.set()
                await asyncio.sleep(REWRITE_SECONDS)

    async def _watch_plan(self) -> None:
        name = self._router.pipeline.name
        async for change in list_and_watch(self._cluster, PLAN, self._namespace):
            if change.key == (self._namespace, name):
                self._apply_plan(change)

    def _apply_plan(self, change: Change) -> None:
        plan_object = change.object or {}
        if ADVISORY_LABEL in plan_object["metadata"].get("labels", {}):
            return
        if change.deleted:
            log.warning("the plan was deleted; the last one stays in use")
            return
        try:
            plan = validate_plan(parse_plan(plan_object, f"{PLAN} {self._router.pipeline.name}"), self._router.pipeline)
            self._require_unrejected(plan, plan_object)
        except DocumentError as error:
            log.warning("%s; the last valid plan stays in use", error)
            self._router.metrics.count_invalid_file(PLAN)
            return
        if self._router.plan is None or plan.spec != self._router.plan.spec:  # ignores changes of its status
            self._replaced_plan = self._router.plan
            apply_plan(self._router, plan)

    def _require_unrejected(self, plan: PipelinePlan, plan_object: Object) -> None:
        """Raise DocumentError for a plan that the operator rejects, and return to the plan that it replaced.

        A router does not know the current budget, whose changes do not restart it; the operator checks it. A router
        without a plan uses a rejected one: the budget may have been lowered below what still runs.
        """
        applied, generation = condition_of(plan_object, "Applied"), plan_object["metadata"].get("generation")
        is_rejected = applied.get("reason") == "PlanRejected" and applied.get("observedGeneration") == generation
        current = self._router.plan
        if not is_rejected or current is None:
            return
        if self._replaced_plan is not None and current.spec == plan.spec:
            apply_plan(self._router, self._replaced_plan)
        raise DocumentError(f"{PLAN} {plan.metadata.name}: the operator rejects it: {applied.get('message', '')}")

    async def _watch_slices(self) -> None:
        labels = f"{PIPELINE_LABEL}={self._router.pipeline.name}"
        async for change in list_and_watch(self._cluster, SLICES, self._namespace, labels):
            if change.synced:
                self._synced = True
            elif change.deleted:
                self._slices.pop(change.key[1], None)
            else:
                self._slices[change.key[1]] = change.object or {}
            if self._synced and self._apply_handle is None:
                self._apply_handle = asyncio.get_running_loop().call_soon(self._apply_slices)

    def _apply_slices(self) -> None:
        """Apply the slices, once all those of one API response have been read."""
        self._apply_handle = None
        try:
            endpoints = ready_endpoints(self._slices.values(), self._router.pipeline, endpoint_names(self._endpoints))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log.warning("%s: %s: %s; the last valid endpoints stay in use", SLICES, type(error).__name__, error)
            self._router.metrics.count_invalid_file(SLICES)
            return
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._router.apply_endpoints(endpoints)
            self._changed.set()
