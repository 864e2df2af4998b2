"""Shell: puts a router together: who carries the batches of its stages, and the desks that decide about them."""

from collections.abc import Mapping
from functools import partial

from trimtab_pipelines.plan import PipelinePlan, first_plan
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_protocol.http_client import Tls
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.limits import Limits
from trimtab_router.observability.metrics import Metrics
from trimtab_router.observability.stage_stats import StageStats
from trimtab_router.request.graph import Graph
from trimtab_router.scheduling.interfaces import Clock, Transport
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.stage_scheduler import StageScheduler
from trimtab_router.transport.http_transport import HttpTransport


def create_transports(graph: Graph, limits: Limits, tls: Tls) -> dict[str, HttpTransport]:
    """Who takes batches to replicas over HTTP, by stage."""
    return {
        stage.name: HttpTransport(
            stage,
            datatypes={read.name: graph.datatype_of(read.source) for read in stage.inputs},
            hang_seconds=limits.hang_seconds,
            max_answer_bytes=limits.answer_bytes,
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
    carriers: Mapping[str, Transport],
    metrics: Metrics,
    grace_seconds: float,
) -> PipelineExecutor:
    """The course of requests through a desk for each stage, each of which tells what it does.

    Args:
        graph: of the pipeline.
        spec: the pipeline's.
        plan: what runs at first; without one each stage starts with its first variant, row by row.
        policy: decides every departure.
        clock: tells the desks the time.
        carriers: take each stage's batches to its replicas.
        metrics: of the router.
        grace_seconds: how long rows are held while no replica is ready.
    """
    suspects, desks = QueryOfDeathDetector(), dict[str, StageScheduler]()
    for stage in graph.stages:
        told, carrier = metrics.stage(stage.name), carriers[stage.name]
        desk = desks[stage.name] = StageScheduler(
            stage,
            plan=plan.spec.stage(stage.name) if plan else first_plan(stage),
            max_rows=spec.queue.max_rows,
            policy=policy,
            drop_policy=spec.drop_policy,
            clock=clock,
            carrier=carrier,
            tally=StageStats(stage.name, told),
            suspects=suspects,
            grace_seconds=grace_seconds,
        )
        told.watch(partial(getattr, desk.queue, "rows"), partial(getattr, desk, "ready_replicas"))
        told.watch_refused(partial(_refused, carrier))
        told.watch_drifted(partial(_drifted, desk, clock))
    return PipelineExecutor(graph, desks, clock)


def _drifted(desk: StageScheduler, clock: Clock) -> int:
    """How many points of a stage are no longer as accurate as they were measured to be."""
    return len({(variant, point) for variant, point, _ in desk.watch.drifted(clock.now)})


def _refused(carrier: Transport) -> int:
    """How many replicas get no work because they are not who they must be."""
    return len(carrier.refused) if isinstance(carrier, HttpTransport) else 0
