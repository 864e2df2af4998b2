"""Shell: one reconcile for each pipeline: when something changed, when it is time, and now and then anyway."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_kubernetes import Cluster, ClusterError, NotFound
from trimtab_operator.metrics import Metrics
from trimtab_operator.objects import SELECTOR, Object
from trimtab_operator.observed import Observed, live_sets, replica_sets
from trimtab_operator.pod_state import pod_states
from trimtab_operator.reconcile import reconcile
from trimtab_operator.settings import Settings
from trimtab_operator.store import Key, Store
from trimtab_operator.work_queue import WorkQueue
from trimtab_operator.writer import Writer

log = logging.getLogger(__name__)

WORKERS = 8
RECONCILE_DEADLINE_SECONDS = 60.0
RESYNC_SECONDS = 300.0
"""A list of everything now and then finds what no watch told, such as an object deleted while one was down."""
OWN_KINDS = ("InferencePipeline", "PipelinePlan", "ModelProfile")
OWNED_KINDS = (
    "ConfigMap",
    "Deployment",
    "Job",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "RoleBinding",
    "Service",
    "ServiceAccount",
)
OPTIONAL_KINDS = ("PodMonitor", "SeldonDeployment")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one reconciliation did."""

    writes: int
    again_seconds: float | None


class Controller:
    """Keeps all pipelines as they should be, while it leads."""

    def __init__(
        self, cluster: Cluster, settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster, self._settings, self._metrics, self._clock = cluster, settings, metrics, clock
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(time.monotonic)
        self._writer = Writer(cluster, self.store, metrics, clock)

    def changed(self, found: Object) -> None:
        """Take note of an object as it is now."""
        self._look_at(self.store.put(found))

    def deleted(self, found: Object) -> None:
        """Take note of an object that is gone."""
        self._look_at(self.store.remove(found))

    def _look_at(self, key: Key | None) -> None:
        if key is not None:
            self.queue.add(key)

    async def lead(self) -> None:
        """Know everything first, then work; ends only by cancellation."""
        await self._resync_until_known()
        async with asyncio.TaskGroup() as working:
            working.create_task(self._resync_now_and_then())
            for _ in range(WORKERS):
                working.create_task(self.queue.work(self._handle))

    async def _resync_until_known(self) -> None:
        while True:
            try:
                await self.resync()
            except ClusterError as error:
                log.warning("cannot list everything yet: %s", error)
                await asyncio.sleep(1.0)
            else:
                return

    async def _resync_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            try:
                await self.resync()
            except ClusterError as error:
                log.warning("resync: %s", error)

    async def resync(self) -> None:
        """List everything anew and look at every pipeline."""
        optional = set()
        for kind in (*OWN_KINDS, *OWNED_KINDS, *OPTIONAL_KINDS):
            try:
                listed = await self._list(kind)
            except NotFound:
                if kind not in OPTIONAL_KINDS:
                    raise
                continue
            if kind in OPTIONAL_KINDS:
                optional.add(kind)
            self.store.keep_only(kind, self._settings.namespaces or None, listed)
        self.store.kinds = frozenset(optional)
        for key in self.store.pipelines():
            self.queue.add(key)

    async def _list(self, kind: str) -> list[Object]:
        labels = None if kind in OWN_KINDS else SELECTOR
        items: list[Object] = []
        for namespace in self._settings.namespaces or (None,):
            items += (await self._cluster.list(kind, namespace, labels)).items
        return items

    async def _handle(self, key: Key) -> float | None:
        with self._metrics.seconds.time():
            try:
                async with asyncio.timeout(RECONCILE_DEADLINE_SECONDS):
                    outcome = await self.reconcile(key)
            except (ClusterError, TimeoutError) as error:
                log.warning("%s/%s: %s; again later", *key, error)
                self._metrics.outcomes.labels("failed").inc()
                raise
            except Exception:
                log.exception("%s/%s: cannot be reconciled", *key)
                self._metrics.outcomes.labels("broken").inc()
                raise
        return outcome.again_seconds

    async def reconcile(self, key: Key) -> Outcome:
        """Look at one pipeline as it is known now, and write what is not as it should be."""
        observed = self.store.observe(key)
        if observed is None:
            self._metrics.forget(key)
            self.store.refused.pop(key, None)
            return Outcome(0, None)
        decided = reconcile(observed, self._settings, self._clock())
        writes = await self._writer.carry_out(key, decided)
        self._metrics.outcomes.labels("changed" if writes else "unchanged").inc()
        self._show(key, observed)
        if writes:
            return Outcome(writes, 0.0)  # status was made of what was there before; look until nothing is left to do
        waits = (decided.requeue_after_seconds, self._writer.retry_seconds(key))
        return Outcome(0, min((seconds for seconds in waits if seconds is not None), default=None))

    def _show(self, key: Key, observed: Observed) -> None:
        live = live_sets(observed.owned, observed.pipeline["spec"].get("deployer", "Deployment"))
        sets = replica_sets(live, pod_states(observed.pods), frozenset())
        after = self.store.observe(key)
        status = (after.pipeline.get("status") or {}) if after else {}
        self._metrics.show(key, [(each, live[each.name]) for each in sets], status)
