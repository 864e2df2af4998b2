"""Factory of a router's clock, its transports, and its executor with one scheduler per stage."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from trimtab_pipelines.plan import PipelinePlan, initial_stage_plan
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_protocol.http_client import Tls
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.execution.graph import Graph
from trimtab_router.limits import Limits
from trimtab_router.observability.metrics import Metrics
from trimtab_router.scheduling.batch_completion import QueryOfDeathDetector
from trimtab_router.scheduling.interfaces import Callback, Clock, PendingArrivals, Transport
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.replica_slots import EngineLoad
from trimtab_router.scheduling.roles import scheduler_class
from trimtab_router.scheduling.stage_scheduler import QueueSettings, StageScheduler
from trimtab_router.transport.http_transport import HttpTransport


def create_transports(graph: Graph, limits: Limits, tls: Tls) -> dict[str, HttpTransport]:
    return {
        stage.name: HttpTransport(
            stage,
            datatypes={read.name: graph.datatype_of(read.source) for read in stage.inputs},
            hang_seconds=limits.hang_seconds,
            max_response_bytes=limits.response_bytes,
            tls=tls,
        )
        for stage in graph.stages
    }


def create_executor(
    graph: Graph,
    spec: InferencePipelineSpec,
    plan: PipelinePlan | None,
    *,
    policy: Policy,
    clock: Clock,
    transports: Mapping[str, Transport],
    metrics: Metrics,
    grace_seconds: float,
) -> PipelineExecutor:
    """Executor with a scheduler for each stage. Without a plan, each starts with its first variant and single rows."""
    detector, schedulers = QueryOfDeathDetector(), dict[str, StageScheduler]()
    for stage in graph.stages:
        stats, transport = metrics.stage(stage.name), transports[stage.name]
        scheduler = schedulers[stage.name] = scheduler_class(stage)(
            stage,
            plan=plan.spec.stage(stage.name) if plan else initial_stage_plan(stage),
            settings=QueueSettings(spec.queue.max_rows, spec.drop_policy, grace_seconds),
            policy=policy,
            clock=clock,
            transport=transport,
            stats=stats,
            query_of_death=detector,
        )
        stats.watch(
            queue_rows=partial(getattr, scheduler.queue, "rows"),
            ready_replicas=partial(getattr, scheduler, "ready_replicas"),
            drifted_points=partial(_drifted_points, scheduler, clock),
            output_drift=partial(_output_drift, scheduler),
            unauthenticated_replicas=partial(_unauthenticated_replicas, transport),
        )
        if any(variant.forwards_chats for variant in stage.variants):
            stats.watch_engines(partial(_engine_load, scheduler))
    return PipelineExecutor(graph, schedulers, clock)


def _engine_load(scheduler: StageScheduler) -> EngineLoad:
    return EngineLoad.total(replica.engine_load for replica in scheduler.replicas if replica.engine_load)


def _output_drift(scheduler: StageScheduler) -> float:
    return max(scheduler.output_monitor.changed().values(), default=0.0)


def _drifted_points(scheduler: StageScheduler, clock: Clock) -> int:
    return len({(variant, point) for variant, point, _ in scheduler.accuracy_monitor.drifted_accuracies(clock.now)})


def _unauthenticated_replicas(transport: Transport) -> int:
    return len(transport.unauthenticated) if isinstance(transport, HttpTransport) else 0


QUIET_TURNS = 16
FEW_QUIET_TURNS = 2
"""Enough to read the requests that sockets hold already."""
JOINING_SECONDS = 0.0002
"""More than the quiet turns take: an arrival so soon after a call would have joined it."""


class EventLoopClock:
    """Monotonic time, and timers of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._joined: set[Callback] = set()
        """Callbacks that an arrival has joined since they were scheduled."""
        self._alone_since: dict[Callback, float] = {}
        """Callbacks that no arrival joined last time, and when they were called."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def call_at(self, deadline: float, callback: Callback) -> None:
        self._loop.call_later(max(deadline - time.monotonic(), 0.0), callback)

    def call_when_idle(self, callback: Callback, pending_arrivals: PendingArrivals) -> None:
        """Call `callback` once several turns of the event loop bring no new arrival.

        Requests being read thus join the batch. A busy router loses no time: it reads the next requests meanwhile. An
        idle one would spend a hundred microseconds on them, so a few turns suffice if none joined last time, unless
        this call follows so soon that its arrival would have joined.
        """
        alone_since = self._alone_since.pop(callback, None)
        few = alone_since is not None and time.monotonic() - alone_since > JOINING_SECONDS
        turns = FEW_QUIET_TURNS if few else QUIET_TURNS
        self._loop.call_soon(self._settle, callback, pending_arrivals, None, turns)

    def _settle(self, callback: Callback, pending_arrivals: PendingArrivals, before: int | None, turns: int) -> None:
        """Call back if a batch is full, or after this many quiet turns."""
        arrivals = pending_arrivals()
        if before not in {None, arrivals}:  # earlier arrivals belong to the event that scheduled the call
            self._joined.add(callback)
            turns = QUIET_TURNS + 1
        if arrivals is None or not turns:
            if callback not in self._joined and arrivals is not None:
                self._alone_since[callback] = time.monotonic()
            self._joined.discard(callback)
            callback()
            return
        self._loop.call_soon(self._settle, callback, pending_arrivals, arrivals, turns - 1)
