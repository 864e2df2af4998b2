"""Shell: carries out a reconciliation, and writes nothing that already is as it should be."""

import logging
from collections.abc import Mapping

from trimtab_kubernetes import Cluster, Conflict, NotFound, Rejected
from trimtab_operator.drift import differs, status_differs
from trimtab_operator.metrics import Metrics
from trimtab_operator.objects import Object, Ref, ref_of
from trimtab_operator.reconcile import Reconciliation
from trimtab_operator.store import Key, Store
from trimtab_pipelines.cluster import OPERATOR_MANAGER

log = logging.getLogger(__name__)

_PIPELINE_FIELDS = ("observedGeneration", "url", "reason", "planGeneration", "stages", "cores", "schedulable")
_PLAN_FIELDS = ("observedGeneration", "appliedGeneration")


class Writer:
    """Writes through one connection and remembers every answer in the store."""

    def __init__(self, cluster: Cluster, store: Store, metrics: Metrics) -> None:
        self._cluster, self._store, self._metrics = cluster, store, metrics

    async def carry_out(self, key: Key, decided: Reconciliation) -> int:
        """Write what differs from what is known to be there; return how many writes that took.

        Raises:
            ClusterError: one of the writes failed; those before it stay, and all may be repeated.
        """
        live = self._store.objects.get(key, {})
        writes = 0
        for manifest in decided.apply:
            if differs(live.get(ref_of(manifest)), manifest):
                await self._apply(manifest)
                writes += 1
        for ref in decided.delete:
            await self._delete(key[0], ref, live)
            writes += 1
        writes += await self._status(key, decided.pipeline_status, _PIPELINE_FIELDS)
        writes += await self._status(key, decided.plan_status, _PLAN_FIELDS)
        for event in decided.events:
            writes += await self._tell(event)
        return writes

    async def _apply(self, manifest: Object, subresource: str | None = None) -> None:
        kind = manifest["kind"]
        self._metrics.writes.labels(kind if subresource is None else f"{kind}/{subresource}").inc()
        applied = await self._cluster.apply(manifest, manager=OPERATOR_MANAGER, subresource=subresource)
        self._store.put(applied)

    async def _delete(self, namespace: str, ref: Ref, live: Mapping[Ref, Object]) -> None:
        """Delete this very object, not one of the same name that somebody made since."""
        self._metrics.writes.labels(ref.kind).inc()
        found = live[ref]
        try:
            await self._cluster.delete(ref.kind, namespace, ref.name, uid=found["metadata"].get("uid"))
        except Conflict:
            log.info("%s %s/%s is another by now", ref.kind, namespace, ref.name)
        self._store.remove(found)

    async def _status(self, key: Key, status: Object | None, own: tuple[str, ...]) -> int:
        if status is None:
            return 0
        live = self._store.objects.get(key, {}).get(ref_of(status))
        if live is None or not status_differs(live, status, own):
            return 0
        try:
            await self._apply(status, "status")
        except NotFound:
            log.info("%s %s/%s is gone", status["kind"], *key)
            self._store.remove(live)
        return 1

    async def _tell(self, event: Object) -> int:
        """Events are worth one attempt: a copy of one that was told, or one that is not allowed, changes nothing."""
        self._metrics.writes.labels("Event").inc()
        try:
            await self._cluster.create(event, manager=OPERATOR_MANAGER)
        except (Conflict, Rejected) as error:
            log.info("event %s: %s", event["metadata"]["name"], error)
        return 1
