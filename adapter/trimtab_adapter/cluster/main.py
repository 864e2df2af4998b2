"""The adapter as a pod: leader election, control loops, health probes and metrics."""

import argparse
import asyncio
import os
import socket

from trimtab_adapter.cluster.pipeline_loops import LoopDependencies, PipelineLoops
from trimtab_adapter.forecasting import TrainedWeights
from trimtab_adapter.metrics import AdapterMetrics
from trimtab_kubernetes import Cluster, ClusterError
from trimtab_kubernetes.client import own_namespace
from trimtab_kubernetes.lease import Lease, Timing, leader_election
from trimtab_kubernetes.process import serve_probes, stop_requested, wait_until
from trimtab_pipelines.documents import DocumentError, load_pools, parse_flavors
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER, FLAVORS_VARIABLE
from trimtab_predictor.metrics_client import PrometheusServer, open_session, tls_context

LEASE = Timing(lease_duration_seconds=10, renew_deadline_seconds=7.0, retry_period_seconds=2.0)
HTTP_TIMEOUT_SECONDS = 2.0
PROMETHEUS_TIMEOUT_SECONDS = 5.0


async def adapt_cluster(options: argparse.Namespace) -> str:
    """Plan until SIGTERM or SIGINT; return the error that prevents it, or an empty string."""
    stop = stop_requested()
    try:
        cluster = await Cluster.connect()
    except ClusterError as error:
        return str(error)
    lease = adapter_lease(cluster, own_namespace(), os.environ.get("POD_NAME") or socket.gethostname())
    try:
        await run_elected(options, cluster, lease, stop)
    except DocumentError as error:  # the pools file or the certificate file
        return str(error)
    return ""


def adapter_lease(cluster: Cluster, namespace: str, identity: str) -> Lease:
    return Lease(cluster, namespace, ADAPTER_MANAGER, identity, LEASE)


async def run_elected(options: argparse.Namespace, cluster: Cluster, lease: Lease, stop: asyncio.Event) -> None:
    """Plan whenever this adapter is the leader; close the connection to the cluster at the end.

    While the API server is unreachable the leader plans on with its cache, and writes nothing until its lease is
    certain.
    """
    metrics, started = AdapterMetrics(), list[PipelineLoops]()
    async with (
        cluster,
        open_session(HTTP_TIMEOUT_SECONDS) as routers,
        open_session(PROMETHEUS_TIMEOUT_SECONDS, tls=tls_context(options.prometheus_ca)) as prometheus_session,
        serve_probes(options.health_port, options.metrics_port, metrics.registry, lambda: _late(started)),
    ):
        prometheus = None
        if options.prometheus is not None:
            prometheus = PrometheusServer(prometheus_session, options.prometheus, options.prometheus_token_file)
        pools = None if options.pools is None else load_pools(options.pools).pools
        weights, guarded_cluster = TrainedWeights(options.weights), cluster.with_write_guard(lambda: lease.is_held)
        flavors = parse_flavors(os.environ.get(FLAVORS_VARIABLE, "[]"))
        dependencies = LoopDependencies(guarded_cluster, routers, prometheus, weights, metrics, pools, flavors)
        namespaces = [name for name in options.namespaces.split(",") if name]

        async def plan() -> None:
            loops = PipelineLoops(dependencies, namespaces)
            started[:] = [loops]
            try:
                await loops.run()
            finally:
                started.clear()

        async with leader_election(lease, plan, keep_running=True) as planning:
            await wait_until(stop, planning)


def _late(started: list[PipelineLoops]) -> str:
    """The health error: pipelines without a tick for three intervals; a waiting adapter is healthy."""
    late = [name for loops in started for name in loops.late()]
    return f"no tick for three intervals: {', '.join(late[:10])}" if late else ""
