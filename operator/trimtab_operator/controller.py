"""`Controller`: reconciles each pipeline after changes, at requested times, and periodically."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_kubernetes import Change, Cluster, ClusterError, NotFound, list_and_watch
from trimtab_kubernetes.client import METADATA, Listing
from trimtab_kubernetes.errors import Backoff
from trimtab_kubernetes.objects import Key, Object, key_of
from trimtab_kubernetes.work_queue import WorkQueue
from trimtab_operator.applier import Applier
from trimtab_operator.manifests.objects import OPTIONAL_KINDS, OWN_KINDS, OWNED_KINDS, SELECTOR
from trimtab_operator.metrics import Metrics
from trimtab_operator.pipeline_cache import PipelineCache
from trimtab_operator.reconcile import Reconciliation, invalid_reconciliation, reconcile
from trimtab_operator.reconciliation.observed_state import ObservedState, live_sets, pod_states, replica_group_states
from trimtab_operator.settings import Settings

log = logging.getLogger(__name__)

WORKERS = 8
RECONCILE_DEADLINE_SECONDS = 60.0
RESYNC_SECONDS = 300.0
"""Interval of complete lists, which find changes that a failed watch missed."""
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 10.0
SELECTORS = dict.fromkeys(OWN_KINDS) | dict.fromkeys((*OWNED_KINDS, *OPTIONAL_KINDS), SELECTOR)


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """Result of one reconciliation."""

    writes: int
    requeue_after_seconds: float | None


@dataclass(frozen=True, slots=True)
class _Settled:
    """A state in which a reconciliation wrote nothing. It is not reconciled again until it changes or a time comes."""

    state: tuple[object, ...]
    until: float


class Controller:
    """Reconciles all pipelines while it is the leader."""

    def __init__(
        self, cluster: Cluster, settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster, self._settings, self._metrics, self._clock = cluster, settings, metrics, clock
        self._namespaces = settings.namespaces or (None,)
        self.store = PipelineCache()
        self.queue: WorkQueue[Key] = WorkQueue(time.monotonic)
        self._applier = Applier(cluster, self.store, metrics, clock)
        self._settled: dict[Key, _Settled] = {}

    async def watch(self) -> None:
        """Watch all kinds, whether this process leads or not; runs without end."""
        async with asyncio.TaskGroup() as watching:
            watched = self.store.objects.watch(self._cluster, SELECTORS, self._namespaces, self._changed)
            watching.create_task(watched)
            if self._settings.watches_nodes:
                watching.create_task(self._watch_nodes())

    async def _watch_nodes(self) -> None:
        async for change in list_and_watch(self._cluster, "Node"):
            if change.object is not None:
                self._changed(change, self.store.put_node(change.object, deleted=change.deleted))

    def _changed(self, _: Change, pipelines: set[Key]) -> None:
        for key in pipelines:
            self.queue.add(key)

    async def lead(self) -> None:
        """List all objects, then reconcile; runs without end."""
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as working:
            working.create_task(self._resync_forever(listed))
            await listed.wait()
            for _ in range(WORKERS):
                working.create_task(self.queue.work(self._handle))

    async def _resync_forever(self, listed: asyncio.Event) -> None:
        backoff = Backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        while True:
            try:
                await self.resync()
            except ClusterError as error:
                hint = "; install the chart trimtab-crds" if isinstance(error, NotFound) else ""
                log.warning("cannot list all objects: %s%s", error, hint)
                await asyncio.sleep(backoff.next_seconds(error))
            else:
                listed.set()
                backoff.reset()
                await asyncio.sleep(RESYNC_SECONDS)

    async def resync(self) -> None:
        optional = set[str]()
        for kind in SELECTORS:
            try:
                await self._list(kind)
            except NotFound:
                if kind not in OPTIONAL_KINDS:
                    raise
            else:
                optional |= {kind} & set(OPTIONAL_KINDS)
        self.store.kinds = frozenset(optional)
        if self._settings.watches_nodes:
            self.store.set_nodes((await self._cluster.list("Node")).items)
        for key in self.store.objects.keys(OWN_KINDS[0]):
            self.queue.add(key)

    async def _list(self, kind: str) -> None:
        """Read the objects of a kind, unless their versions are known."""
        objects, selector = self.store.objects, SELECTORS[kind]
        for namespace in self._namespaces:
            names, version, all_known = list[Object](), "", True
            async for page in self._cluster.pages(kind, namespace, selector, accept=METADATA):
                all_known = all_known and all(map(objects.is_known, page.items))
                names += [
                    {"metadata": dict(zip(("namespace", "name"), key_of(item), strict=True))} for item in page.items
                ]
                version = page.resource_version
            for found in objects.missing(kind, namespace, Listing(names, version)):
                objects.remove(found)
            if not all_known:
                async for page in self._cluster.pages(kind, namespace, selector):
                    for item in page.items:
                        objects.put(item)

    async def _handle(self, key: Key) -> float | None:
        with self._metrics.seconds.time():
            try:
                async with asyncio.timeout(RECONCILE_DEADLINE_SECONDS):
                    outcome = await self.reconcile(key)
            except (ClusterError, TimeoutError) as error:
                log.warning("%s/%s: %s; retrying later", *key, error)
                self._metrics.outcomes.labels("failed").inc()
                raise
            except Exception:
                log.exception("%s/%s: reconciliation failed", *key)
                self._metrics.outcomes.labels("broken").inc()
                raise
        return outcome.requeue_after_seconds

    async def reconcile(self, key: Key) -> ReconcileResult:
        state, settled = self.store.state(key), self._settled.get(key)
        is_settled = settled is not None and settled.state == state and not self.store.refused.get(key)
        if settled is not None and is_settled and self._clock() < settled.until:
            self._metrics.outcomes.labels("unchanged").inc()
            return self._unchanged(settled.until)
        observed = self.store.observe(key)
        if observed is None:
            self._metrics.forget(key)
            self.store.refused.pop(key, None)
            self._settled.pop(key, None)
            return ReconcileResult(0, None)
        decided = self._decide(key, observed)
        writes = await self._applier.apply(key, decided)
        self._metrics.outcomes.labels("changed" if writes else "unchanged").inc()
        self._update_metrics(key, observed)
        if writes:
            return ReconcileResult(writes, 0.0)  # the status describes the state before the writes: reconcile again
        waits = (decided.requeue_after_seconds, self._applier.retry_seconds(key))
        until = self._clock() + min((seconds for seconds in waits if seconds is not None), default=math.inf)
        if self.store.refused.get(key):
            self._settled.pop(key, None)
        else:
            self._settled[key] = _Settled(state, until)
        return self._unchanged(until)

    def _unchanged(self, until: float) -> ReconcileResult:
        return ReconcileResult(0, max(until - self._clock(), 0.0) if until < math.inf else None)

    def _decide(self, key: Key, observed: ObservedState) -> Reconciliation:
        """Reconcile purely; a defect that one pipeline's objects trigger becomes a condition of that pipeline."""
        now = self._clock()
        try:
            return reconcile(observed, self._settings, now)
        except Exception as error:
            log.exception("%s/%s: reconciliation failed", *key)
            self._metrics.outcomes.labels("broken").inc()
            message = f"the operator cannot reconcile this pipeline: {type(error).__name__}: {error}"
            failed = invalid_reconciliation(observed, message, now, "ReconcileFailed")
            return replace(failed, requeue_after_seconds=RESYNC_SECONDS)

    def _update_metrics(self, key: Key, observed: ObservedState) -> None:
        live = live_sets(observed.owned, observed.pipeline["spec"].get("deployer", "Deployment"))
        sets = replica_group_states(live, pod_states(observed.pods), frozenset())
        after = self.store.observe(key)
        status = (after.pipeline.get("status") or {}) if after else {}
        self._metrics.show(key, [(each, live[each.name]) for each in sets], status)
