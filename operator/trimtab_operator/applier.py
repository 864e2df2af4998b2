"""`Applier`: carries out a reconciliation with as few writes as possible, without overwriting objects of others.

An object is read before its first write, and later writes are bound to its uid. A rejected write does not block others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus

from trimtab_kubernetes import Cluster, ClusterError, Conflict, NotFound, Rejected, Unreachable
from trimtab_kubernetes.objects import Key, Object, fingerprint
from trimtab_operator.manifests.objects import Ref, ref_of
from trimtab_operator.metrics import Metrics
from trimtab_operator.pipeline_cache import PipelineCache
from trimtab_operator.reconcile import Reconciliation
from trimtab_operator.reconciliation.object_diff import difference, differs, status_differs
from trimtab_operator.reconciliation.write_errors import (
    Reason,
    RejectedWrite,
    may_overwrite,
    not_owned_message,
)
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER

log = logging.getLogger(__name__)

_PIPELINE_FIELDS = ("observedGeneration", "url", "reason", "planGeneration", "stages", "cores", "schedulable")
PATCH_MANAGER = f"{OPERATOR_MANAGER}-scale"
"""Field manager of replica numbers of objects that the pipeline no longer describes, and of pods' deletion costs."""
_PLAN_FIELDS = ("observedGeneration", "appliedGeneration")


class _NotWrittenError(Exception):
    """An object differs from its manifest although the cluster rejected nothing; the message says why."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Applier:
    """Writes objects through one connection and stores the responses in the cache."""

    def __init__(self, cluster: Cluster, store: PipelineCache, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._cluster, self._store, self._metrics, self._clock = cluster, store, metrics, clock
        self._altered_statuses: dict[tuple[Key, str], str] = {}
        """Statuses that the cluster stored in an altered form, by pipeline and kind."""

    async def apply(self, key: Key, decided: Reconciliation) -> int:
        """Write what differs from the known state; return the number of writes.

        Rejected writes are stored in the cache and count as writes, since the status reports them. Raises ClusterError
        if the API server did not respond; earlier writes remain, and all may be repeated.
        """
        store, writes = self._store, 0
        # First, so that pods have their deletion cost when their number falls; together, since there may be hundreds.
        writes += await _sum(self._apply_if_changed(key, manifest, self._patch) for manifest in decided.patch)
        for manifest in decided.apply:
            writes += await self._apply_if_changed(key, manifest, self._write)
        for ref in decided.delete:
            found = store.get(key, ref)
            writes += 0 if found is None else await self._try(key, ref, found, self._delete)
        store.prune_rejected_writes(key, {*map(ref_of, (*decided.apply, *decided.patch)), *decided.delete})
        writes += await self._status(key, decided.pipeline_status, _PIPELINE_FIELDS)
        writes += await self._status(key, decided.plan_status, _PLAN_FIELDS)
        return writes + await _sum(map(self._create_event, decided.events))

    def retry_seconds(self, key: Key) -> float | None:
        """Seconds until rejected writes are retried; None if there are none."""
        due = [refusal.until for refusal in self._store.refused.get(key, {}).values()]
        return max(min(due) - self._clock(), 0.0) if due else None

    async def _apply_if_changed(self, key: Key, manifest: Object, write: Callable[..., Awaitable[None]]) -> int:
        """Write an object if it differs; otherwise clear its rejected write."""
        ref, refused = ref_of(manifest), self._store.refused
        if differs(self._store.get(key, ref), manifest):
            return await self._try(key, ref, manifest, write)
        return 0 if refused.get(key, {}).pop(ref, None) is None else 1

    async def _try(self, key: Key, ref: Ref, manifest: Object, write: Callable[..., Awaitable[None]]) -> int:
        """Write one object or record its rejection; return the writes, 0 if it is too early to retry."""
        refused, version = self._store.refused[key], fingerprint([write.__name__, manifest])
        before = refused.get(ref)
        if before is not None and before.is_waiting(version, self._clock()):
            return 0
        try:
            await write(key, manifest)
        except _NotWrittenError as error:
            self._refuse(key, RejectedWrite(ref, error.reason, str(error), version, self._clock()))
        except ClusterError as error:
            if isinstance(error, Unreachable) and error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            message = f"{ref.kind} {ref.name} was refused: {error}"
            self._refuse(key, RejectedWrite(ref, "WriteRejected", message, version, self._clock()))
        else:
            refused.pop(ref, None)
        return 1

    def _refuse(self, key: Key, refusal: RejectedWrite) -> None:
        refused = self._store.refused[key]
        log.warning("%s/%s: %s", *key, refusal.message)
        self._metrics.refusals.labels(refusal.ref.kind, refusal.reason).inc()
        refused[refusal.ref] = refusal.following(refused.get(refusal.ref))

    async def _write(self, key: Key, manifest: Object) -> None:
        """Create an object or overwrite our own; _NotWrittenError if another owner's exists."""
        ref = ref_of(manifest)
        found = self._store.get(key, ref)
        if found is None or not may_overwrite(found, manifest):
            found = await self._cluster.get(ref.kind, key[0], ref.name)
        if found is not None and not may_overwrite(found, manifest):
            raise _NotWrittenError("NotOwned", not_owned_message(found))
        try:
            applied = await self._apply(manifest, only=found)
        except Conflict:
            if found is not None:
                self._store.objects.remove(found)  # deleted or replaced: read it again
            log.info("%s %s/%s was replaced", ref.kind, key[0], ref.name)
        else:
            _require_applied(applied, manifest)

    async def _patch(self, key: Key, manifest: Object) -> None:
        """Change a few fields of the observed object; does nothing if it is gone."""
        found = self._store.get(key, ref_of(manifest))
        if found is None:
            return
        self._metrics.writes.labels(manifest["kind"]).inc()
        applied = await self._cluster.apply(_with_uid(found, manifest), manager=PATCH_MANAGER)
        self._store.objects.put(applied)
        _require_applied(applied, manifest)

    async def _apply(self, manifest: Object, subresource: str | None = None, only: Object | None = None) -> Object:
        """Apply by force over `only`, if given, else without taking over others' fields; return what is stored."""
        kind, force = manifest["kind"], only is not None or subresource is not None
        self._metrics.writes.labels(kind if subresource is None else f"{kind}/{subresource}").inc()
        body = manifest if only is None else _with_uid(only, manifest)
        applied = await self._cluster.apply(body, manager=OPERATOR_MANAGER, subresource=subresource, force=force)
        self._store.objects.put(applied)
        return applied

    async def _delete(self, key: Key, found: Object) -> None:
        """Delete the observed object, but not a newer one of the same name."""
        ref = ref_of(found)
        self._metrics.writes.labels(ref.kind).inc()
        try:
            await self._cluster.delete(ref.kind, key[0], ref.name, uid=found["metadata"].get("uid"))
        except Conflict:
            log.info("%s %s/%s was replaced", ref.kind, key[0], ref.name)
        self._store.objects.remove(found)

    async def _status(self, key: Key, status: Object | None, own: tuple[str, ...]) -> int:
        """Write a status if it differs, unless the cluster stores an altered form and nothing is new."""
        if status is None:
            return 0
        place, live = (key, status["kind"]), self._store.get(key, ref_of(status))
        if live is None or not status_differs(live, status, own):
            self._altered_statuses.pop(place, None)
            return 0
        if self._altered_statuses.get(place) == _status_fingerprint(live, status):
            return 0
        try:
            applied = await self._apply(status, "status")
        except NotFound:
            log.info("%s %s/%s was deleted", status["kind"], *key)
            self._store.objects.remove(live)
        else:
            if status_differs(applied, status, own):
                log.warning("the cluster altered the status of %s %s/%s; its CRD may be outdated", place[1], *key)
                self._altered_statuses[place] = _status_fingerprint(applied, status)
        return 1

    async def _create_event(self, event: Object) -> int:
        """Create an Event; duplicates and missing permissions are ignored."""
        self._metrics.writes.labels("Event").inc()
        try:
            await self._cluster.create(event, manager=OPERATOR_MANAGER)
        except (Conflict, Rejected) as error:
            log.info("event %s: %s", event["metadata"]["name"], error)
        return 1


async def _sum(writes: Iterable[Awaitable[int]]) -> int:
    """Await writes together; return their sum.

    If one fails, the others end first, so that the next pass meets none of them.
    """
    tasks = [asyncio.ensure_future(write) for write in writes]
    await asyncio.gather(*tasks, return_exceptions=True)
    return sum(task.result() for task in tasks)


def _status_fingerprint(live: Object, wanted: Object) -> str:
    return fingerprint([live.get("status"), wanted["status"]])


def _with_uid(found: Object, manifest: Object) -> Object:
    return {**manifest, "metadata": {**manifest["metadata"], "uid": found["metadata"]["uid"]}}


def _require_applied(applied: Object, manifest: Object) -> None:
    """Raise if the stored object differs from the manifest, since repeating the write would change nothing."""
    path, ref = difference(applied, manifest), ref_of(manifest)
    if path is not None:
        message = f"{ref.kind} {ref.name}: the cluster altered {path}; check for admission webhooks that change it"
        raise _NotWrittenError("FieldNotApplied", message)
