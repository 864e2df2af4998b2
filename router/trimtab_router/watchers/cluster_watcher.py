"""Shell: follows the pipeline's plan and replicas as the cluster's API tells of them.

The API server may be away at any time, from the start or later: what was known last stays in force. A plan that cannot
be used is logged and counted, and the last good one stays.
"""

import asyncio
import logging

from trimtab_kubernetes import Change, Cluster, list_and_watch
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.documents import DocumentError, parse_plan
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.kubernetes_names import ADVISORY_LABEL, PIPELINE_LABEL
from trimtab_pipelines.plan_validation import validate_plan
from trimtab_router.router import Router
from trimtab_router.watchers.endpoint_slices import endpoints_of, names_of

log = logging.getLogger(__name__)

PLAN, SLICES = "PipelinePlan", "EndpointSlice"


class ClusterWatcher:
    """Applies plan and replicas to a router whenever the cluster says that they changed."""

    def __init__(self, router: Router, cluster: Cluster, namespace: str) -> None:
        self._router = router
        self._cluster = cluster
        self._namespace = namespace
        self._slices: dict[str, Object] = {}
        self._endpoints = Endpoints()
        self._synced = False
        self._settling: asyncio.Handle | None = None

    async def watch(self) -> None:
        """Follow both for ever."""
        async with asyncio.TaskGroup() as following:
            following.create_task(self._follow_plan())
            following.create_task(self._follow_slices())

    async def _follow_plan(self) -> None:
        name = self._router.pipeline.name
        async for change in list_and_watch(self._cluster, PLAN, self._namespace):
            if change.key == (self._namespace, name):
                self._take_plan(change)

    def _take_plan(self, change: Change) -> None:
        found = change.object or {}
        if ADVISORY_LABEL in found["metadata"].get("labels", {}):
            return
        if change.deleted:
            log.warning("the plan is gone; the last one stays in force")
            return
        try:
            plan = validate_plan(parse_plan(found, f"{PLAN} {self._router.pipeline.name}"), self._router.pipeline)
        except DocumentError as error:
            log.warning("%s; the last good one stays in force", error)
            self._router.metrics.broken_file(PLAN)
            return
        if self._router.plan is None or plan.spec != self._router.plan.spec:  # its status changes more often
            self._router.apply_plan(plan)
            log.info("plan %d is in force", plan.spec.generation)

    async def _follow_slices(self) -> None:
        labels = f"{PIPELINE_LABEL}={self._router.pipeline.name}"
        async for change in list_and_watch(self._cluster, SLICES, self._namespace, labels):
            if change.synced:
                self._synced = True
            elif change.deleted:
                self._slices.pop(change.key[1], None)
            else:
                self._slices[change.key[1]] = change.object or {}
            if self._synced and self._settling is None:
                self._settling = asyncio.get_running_loop().call_soon(self._apply)

    def _apply(self) -> None:
        """Apply what is known, once all that one answer of the API brought is known."""
        self._settling = None
        try:
            found = endpoints_of(self._slices.values(), self._router.pipeline, names_of(self._endpoints))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log.warning("%s: %s: %s; the last good ones stay in use", SLICES, type(error).__name__, error)
            self._router.metrics.broken_file(SLICES)
            return
        if found != self._endpoints:
            self._endpoints = found
            self._router.apply_endpoints(found)
