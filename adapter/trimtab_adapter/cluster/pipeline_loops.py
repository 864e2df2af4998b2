"""`PipelineLoops`: starts, replaces and stops one control loop per pipeline as pipelines change."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import aiohttp

from trimtab_adapter.cluster.config_source import (
    PIPELINE,
    PLAN,
    PROFILE,
    SELECTORS,
    SLICE,
    ClusterCache,
    ClusterConfigSource,
    OwnerKey,
    owner_key,
)
from trimtab_adapter.cluster.plan_publisher import ClusterPlanPublisher
from trimtab_adapter.cluster.router_metrics_source import RouterMetricsSource, addresses
from trimtab_adapter.cluster.status_writer import StatusWriter
from trimtab_adapter.control_loop import ControlLoop, LoadSources
from trimtab_adapter.controller import LOAD_CHECK_SECONDS, Tick
from trimtab_adapter.forecasting import CurrentForecaster, TrainedWeights
from trimtab_adapter.load_sources import PrometheusSource
from trimtab_adapter.metrics import AdapterMetrics
from trimtab_adapter.planning.pool_planner import PoolPlanner
from trimtab_kubernetes import Change, Cluster
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.kubernetes_names import router_admin_name
from trimtab_pipelines.spec import InferencePipeline, Pool
from trimtab_predictor.metrics_client import PrometheusServer

log = logging.getLogger(__name__)

LOAD_CHECKS_PER_SECOND = 50.0
"""Load checks of all loops together."""
LATE_INTERVALS = 3.0
LATE_SECONDS = 60.0
"""At least this long: the longest decision and its rest must not restart the pod."""
SOLVERS = 2


class SolverPool:
    """Threads of decisions: a few for all pipelines, and one per budget pool.

    Decisions of one budget pool wait for each other; a thread of its own keeps them from delaying other pipelines.
    """

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._shared = ThreadPoolExecutor(SOLVERS, thread_name_prefix="solve")
        self._pools = {name: ThreadPoolExecutor(1, thread_name_prefix=f"solve-{name}") for name in pools}

    def threads(self, pipeline: InferencePipeline) -> Executor:
        return self._pools.get(pipeline.spec.budget.pool or "", self._shared)

    def close(self) -> None:
        for threads in (self._shared, *self._pools.values()):
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class LoopDependencies:
    """Collaborators that all loops share."""

    cluster: Cluster
    routers: aiohttp.ClientSession
    prometheus: PrometheusServer | None
    weights: TrainedWeights
    metrics: AdapterMetrics
    pools: Mapping[str, Pool] | None = None
    """Without pools, a pipeline with a pool plans within its own budget."""
    flavors: Sequence[ResourceFlavor] = ()
    """Resource flavors of the cluster."""


@dataclass(slots=True)
class _Member:
    """One pipeline's loop."""

    uid: str
    loop: ControlLoop
    status_writer: StatusWriter
    stop: asyncio.Event
    task: asyncio.Task[None]
    inputs_seen: tuple[object, ...]


class PipelineLoops:
    """The pipelines of some namespaces, or of all."""

    def __init__(self, dependencies: LoopDependencies, namespaces: Sequence[str] = ()) -> None:
        self._dependencies, self._namespaces = dependencies, tuple(namespaces) or (None,)
        self._cache = ClusterCache()
        self._members: dict[Key, _Member] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}
        self._closing = False
        self._pools = None if dependencies.pools is None else PoolPlanner(dependencies.pools)
        self._executors = SolverPool(dependencies.pools or ())

    async def run(self) -> None:
        """Plan for all pipelines; ends by cancellation, after every loop has stopped and reported."""
        cluster = self._dependencies.cluster
        watching = asyncio.create_task(self._cache.watch(cluster, SELECTORS, self._namespaces, self._changed))
        starting = asyncio.create_task(self._start_all())
        try:
            await watching
        finally:
            self._closing = True
            for task in (watching, starting):
                task.cancel()
            await asyncio.gather(watching, starting, return_exceptions=True)
            await asyncio.gather(*(self._stop(key) for key in list(self._members)), *self._ending.values())
            self._executors.close()

    def late(self) -> list[str]:
        """The pipelines whose loop has not ticked for three intervals and at least a minute."""
        now = time.monotonic()
        return [
            "/".join(key)
            for key, member in self._members.items()
            if now - member.loop.ticked_at > max(LATE_INTERVALS * member.loop.interval_seconds, LATE_SECONDS)
        ]

    async def _start_all(self) -> None:
        """Start the loops after the first list, so that no existing plan is overlooked."""
        await self._cache.synced.wait()
        log.info("%d pipelines known", len(self._cache.keys(PIPELINE)))
        for key in self._cache.keys(PIPELINE):
            self._start(key)

    def _changed(self, change: Change, concerned: set[OwnerKey]) -> None:
        found = change.object
        if found is None or not self._cache.synced.is_set():
            return
        for kind, namespace, owner in concerned | {owner_key(found)}:
            if kind == PIPELINE:
                self._pipeline_changed((namespace, owner), found, deleted=change.deleted)
            elif kind == SLICE:
                for key in [key for key in self._members if (key[0], router_admin_name(key[1])) == (namespace, owner)]:
                    self._wake(key)
            else:
                self._wake((namespace, owner))

    def _pipeline_changed(self, key: Key, found: Object, *, deleted: bool) -> None:
        member = self._members.get(key)
        is_there = not (deleted or found["metadata"].get("deletionTimestamp"))
        if member is None:
            self._start(key)
        elif is_there and member.uid == found["metadata"]["uid"]:
            self._wake(key)
        else:
            self._replace(key, member)

    def _loop_ended(self, key: Key, member: _Member, task: asyncio.Task[None]) -> None:
        """Replace a loop that failed, one interval later, so that it cannot monopolise the process."""
        if not (self._closing or task.cancelled()) and (fault := task.exception()) is not None:
            log.error("%s/%s: control loop failed; starting another", *key, exc_info=fault)
            asyncio.get_running_loop().call_later(member.loop.interval_seconds, self._replace, key, member)

    def _replace(self, key: Key, member: _Member) -> None:
        """Stop a loop, unless it is stopping, and start one for the pipeline's current state."""
        if not self._closing and self._members.get(key) is member and key not in self._ending:
            self._ending[key] = asyncio.create_task(self._end(key))

    async def _end(self, key: Key) -> None:
        """Stop a loop; one for a new pipeline of that name starts after the old one's last write."""
        try:
            await self._stop(key)
        finally:
            del self._ending[key]
        self._start(key)

    def _start(self, key: Key) -> None:
        """Start a loop if the pipeline exists and its previous loop has ended; one that cannot start is logged."""
        found = self._cache.get(PIPELINE, key)
        if self._closing or key in self._ending or found is None or found["metadata"].get("deletionTimestamp"):
            return
        try:
            self._members[key] = self._start_member(key, str(found["metadata"]["uid"]))
        except DocumentError as error:
            log.warning("%s", error)
        except Exception:  # other pipelines must not depend on this one
            log.exception("%s/%s: the control loop cannot start", *key)

    def _start_member(self, key: Key, uid: str) -> _Member:
        dependencies, config = self._dependencies, ClusterConfigSource(self._cache, key, self._dependencies.flavors)
        status_writer = StatusWriter(dependencies.cluster, self._cache, key)

        async def report(tick: Tick) -> None:
            dependencies.metrics.take(key, tick)
            status_writer.report(tick)

        routers, prometheus = RouterMetricsSource(dependencies.routers, self._cache, key), dependencies.prometheus
        loads = routers if prometheus is None else PrometheusSource(prometheus, *key, routers.ready)
        loop = ControlLoop(
            config,
            ClusterPlanPublisher(dependencies.cluster, self._cache, key, report),
            LoadSources(loads, routers, self._check_seconds),
            CurrentForecaster(lambda: config.pipeline.spec.adaptation, dependencies.weights),
            self._executors.threads,
        )
        if self._pools is not None:
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, loop.wake)
            loop.controller.planner = self._pools.planner("/".join(key), config.pipeline, loop.current, wake)
            loop.record_usage = partial(self._pools.record_usage, "/".join(key), wake)
        stop = asyncio.Event()
        task = asyncio.create_task(loop.run(stop, first=tick_offset(key)))
        member = _Member(uid, loop, status_writer, stop, task, self._watched_inputs(key))
        task.add_done_callback(partial(self._loop_ended, key, member))
        return member

    async def _stop(self, key: Key) -> None:
        member = self._members.pop(key, None)
        if member is None:
            return
        member.stop.set()
        await asyncio.gather(member.task, return_exceptions=True)
        await member.status_writer.close()
        self._dependencies.metrics.forget(key)
        if self._pools is not None:
            self._pools.remove("/".join(key))

    def _wake(self, key: Key) -> None:
        """Trigger a tick if its inputs changed, not for our own status or plan."""
        member = self._members.get(key)
        if member is None:
            return
        inputs_seen = self._watched_inputs(key)
        if inputs_seen != member.inputs_seen:
            member.inputs_seen = inputs_seen
            member.loop.wake()

    def _watched_inputs(self, key: Key) -> tuple[object, ...]:
        """State whose change triggers a decision: spec, budget, profiles, routers, and whether a plan exists."""
        pipeline = self._cache.get(PIPELINE, key) or {"metadata": {}}
        profiles = self._cache.owned_by(PROFILE, *key)
        slices = self._cache.owned_by(SLICE, key[0], router_admin_name(key[1]))
        return (
            pipeline["metadata"].get("generation"),
            str((pipeline.get("status") or {}).get("schedulable")),
            sorted((p["metadata"]["name"], p["metadata"].get("generation", 0)) for p in profiles),
            sum(address.ready for address in addresses(slices)),
            self._cache.get(PLAN, key) is None,
        )

    def _check_seconds(self) -> float:
        return max(LOAD_CHECK_SECONDS, len(self._members) / LOAD_CHECKS_PER_SECOND)


def tick_offset(key: Key) -> float:
    """The share of an interval until a pipeline's first tick, stable across restarts."""
    digest = hashlib.sha256("/".join(key).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
