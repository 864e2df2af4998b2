"""`ClusterPlanPublisher`: writes plans by server-side apply, and continues from a valid plan that another client wrote.

An invalid plan is replaced. The object's generation, not its content, identifies our own writes: the watch may return
our previous plan after we wrote the next.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable

from trimtab_adapter.cluster.config_source import PIPELINE, PLAN, ClusterCache
from trimtab_adapter.controller import Tick, actionable_fields
from trimtab_adapter.planning.explain import describe_option
from trimtab_kubernetes import Cluster, ClusterError, Conflict, Rejected
from trimtab_kubernetes.objects import Key, Object, owner_reference
from trimtab_pipelines.documents import DocumentError, accept_plan, parse_plan
from trimtab_pipelines.kubernetes_names import (
    ADAPTER_MANAGER,
    ADVISORY_LABEL,
    MANAGED_BY,
    PIPELINE_LABEL,
    advisory_name,
)
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)

ATTEMPTS_REMEMBERED = 16
Identity = tuple[str, int]
"""UID and generation of an object."""


class ClusterPlanPublisher:
    """One pipeline's plan and proposal; ticks are passed to `report`."""

    def __init__(
        self, cluster: Cluster, cache: ClusterCache, key: Key, report: Callable[[Tick], Awaitable[None]]
    ) -> None:
        self._cluster, self._cache, self._key, self._report = cluster, cache, key, report
        self._written: Identity | None = None
        self._published_fields: tuple[object, ...] | None = None
        self._invalid: Identity | None = None
        self._considered: Object | None = None  # the plan the current decision started from
        self._attempted: deque[tuple[object, ...]] = deque(maxlen=ATTEMPTS_REMEMBERED)

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """The plan from the API if another client wrote a valid one; else our own."""
        found = self._considered = self._cache.get(PLAN, self._key)
        if found is None or self._is_own(found) or self._invalid == identity(found):
            return own
        where = f"{PLAN} {self._key[0]}/{self._key[1]}"
        try:
            plan = accept_plan(parse_plan(found, where), pipeline)
        except DocumentError as error:
            log.warning("%s; it will be replaced", error)
            self._invalid = identity(found)
            return own
        self._written, self._published_fields = identity(found), actionable_fields(plan)
        if own is None:
            return plan
        if actionable_fields(plan) in self._attempted:
            return own
        log.info("%s was written by another client: continuing from it", where)
        generation = max(plan.spec.generation, own.spec.generation)  # our next plan must be newer than both
        return plan.with_spec(generation=generation)

    async def publish(self, plan: PipelinePlan) -> None:
        """Write the plan if it differs from the one in force, and delete an obsolete proposal."""
        found = self._considered
        stays = found is not None and self._is_own(found) and not self._owned_by_other(found)
        if not stays or self._published_fields != actionable_fields(plan):
            await self._write(plan, found)
        await self._delete_proposal()

    async def _write(self, plan: PipelinePlan, existing: Object | None) -> None:
        body = self._body(plan, self._key[1])
        self._attempted.append(actionable_fields(plan))  # a write without a response may have succeeded
        try:
            applied = await self._apply(body, existing)
            if not _same_stages(applied, body):
                applied = await self._recreate(body, applied)
        except ClusterError as error:
            number = plan.spec.generation
            log.warning("plan %d of %s not written: %s; retrying at the next tick", number, self._key, error)
            return
        if existing is None or identity(applied) != identity(existing):
            log.info("%s/%s: plan %d: %s", *self._key, plan.spec.generation, plan.spec.explanation.change)
        self._written, self._published_fields, self._invalid = identity(applied), actionable_fields(plan), None
        self._considered = applied
        self._cache.put(applied)

    async def _apply(self, body: Object, existing: Object | None) -> Object:
        """Apply over the plan this decision started from; Conflict if another client wrote one since."""
        while existing is not None:
            version = {key: existing["metadata"][key] for key in ("uid", "resourceVersion")}
            versioned = {**body, "metadata": body["metadata"] | version}
            try:
                return await self._cluster.apply(versioned, manager=ADAPTER_MANAGER)
            except Rejected:  # maybe it is invalid only together with another client's fields
                found = await self._cluster.get(PLAN, *self._key)
                if found is None or not _has_other_managers(found):
                    raise
                return await self._recreate(body, found)
            except Conflict:
                latest = await self._cluster.get(PLAN, *self._key)
                if latest is not None and identity(latest) != identity(existing):
                    raise
                existing = latest  # gone, or only its status has changed
        return await self._cluster.apply(body, manager=ADAPTER_MANAGER)

    async def _recreate(self, body: Object, found: Object) -> Object:
        """A field that another client applied stays in the object: only a new object removes it."""
        log.warning("%s: the plan has fields of another client; recreating it", self._key)
        await self._cluster.delete(PLAN, *self._key, uid=found["metadata"]["uid"])
        return await self._cluster.apply(body, manager=ADAPTER_MANAGER)

    async def propose(self, plan: PipelinePlan) -> None:
        """Write the plan under the proposal's name if it would run something else than the last proposal."""
        key = self._key[0], advisory_name(self._key[1])
        found = self._cache.get(PLAN, key)
        if found is not None and not _is_proposal(found):
            consequence = f"it stays, and the proposal for {self._key[1]} is not written"
            log.warning("PipelinePlan %s/%s is not a proposal: %s", *key, consequence)
            return
        if found is not None and _proposes_same(found, plan):
            return
        body = self._body(plan, key[1], advisory=True)
        try:
            self._cache.put(await self._cluster.apply(body, manager=ADAPTER_MANAGER))
        except ClusterError as error:
            log.warning("proposal for %s not written: %s; retrying at the next tick", self._key, error)

    async def report(self, tick: Tick) -> None:
        await self._report(tick)

    async def _delete_proposal(self) -> None:
        key = self._key[0], advisory_name(self._key[1])
        found = self._cache.get(PLAN, key)
        if found is None or not _is_proposal(found):
            return
        try:
            await self._cluster.delete(PLAN, *key, uid=found["metadata"]["uid"])
        except ClusterError as error:
            log.warning("proposal for %s not deleted: %s", self._key, error)
            return
        self._cache.remove(found)

    def _is_own(self, found: Object) -> bool:
        uid, generation = identity(found)
        return self._written is not None and uid == self._written[0] and generation <= self._written[1]

    def _owned_by_other(self, found: Object) -> bool:
        """Whether it belongs to a deleted pipeline of the same name and will be garbage collected."""
        owner = self._cache.get(PIPELINE, self._key)
        references = found["metadata"].get("ownerReferences", ())
        uids = {reference["uid"] for reference in references if reference["kind"] == PIPELINE}
        return owner is not None and bool(uids) and owner["metadata"]["uid"] not in uids

    def _body(self, plan: PipelinePlan, name: str, *, advisory: bool = False) -> Object:
        body: Object = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
        labels = {PIPELINE_LABEL: self._key[1], MANAGED_BY: ADAPTER_MANAGER}
        if advisory:
            labels[ADVISORY_LABEL] = "true"
        body["metadata"] = {"name": name, "namespace": self._key[0], "labels": labels}
        owner = self._cache.get(PIPELINE, self._key)
        if owner is not None:
            body["metadata"]["ownerReferences"] = [owner_reference(owner)]
        return body


def identity(found: Object) -> Identity:
    """UID and generation; the generation increases with each change of the spec."""
    return str(found["metadata"].get("uid", "")), int(found["metadata"].get("generation", 0))


def _is_proposal(found: Object) -> bool:
    return ADVISORY_LABEL in found["metadata"].get("labels", {})


def _has_other_managers(found: Object) -> bool:
    fields = found["metadata"].get("managedFields", [])
    return any(each["manager"] != ADAPTER_MANAGER and "subresource" not in each for each in fields)


def _same_stages(applied: Object, body: Object) -> bool:
    return [stage["name"] for stage in applied["spec"]["stages"]] == [stage["name"] for stage in body["spec"]["stages"]]


def _proposes_same(found: Object, plan: PipelinePlan) -> bool:
    try:
        stages = parse_plan(found, PLAN).spec.stages, plan.spec.stages
    except DocumentError:
        return False
    before, now = ([(stage.name, describe_option(stage)) for stage in each] for each in stages)
    return before == now
