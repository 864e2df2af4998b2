"""Router process: connects a router to its files or cluster, its listeners and its signals."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.processes.child_process import RouterPorts, print_ready_line
from trimtab_pipelines.processes.malloc_tuning import release_freed_memory
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.event_loop import Service, start_service
from trimtab_protocol.host_check import HostCheck
from trimtab_protocol.http_client import Tls
from trimtab_protocol.mutual_tls import InvalidIdentity, MutualTls
from trimtab_router.envoy.key_watcher import key_watch
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.listeners import Listeners
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.ingress.task_store import TaskFolder, TaskStore
from trimtab_router.limits import Limits, in_flight_bytes, payload_bytes
from trimtab_router.observability.tracing import create_tracer
from trimtab_router.router import Router
from trimtab_router.watchers.certificate_watcher import watch_certificates
from trimtab_router.watchers.file_watcher import FileWatcher

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

log = logging.getLogger(__name__)

TASKS_SECONDS = 3.0
"""Maximum time for which registered tasks delay the start."""


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of the router process. Port 0 lets the system choose."""

    pipeline: Path
    plan: Path
    endpoints: Path | None
    """File of the replicas. None: replicas and later plans come from the Kubernetes API."""
    namespace: str | None = None
    """Namespace of the pipeline, None for that of its document."""
    linger_seconds: float = 0.0
    """After a stop signal, in which requests are accepted by an unready router."""
    host: str = "127.0.0.1"
    rest_port: int = 0
    """Port for plain REST, without `sockets`."""
    admin_port: int = 0
    tasks: Path | None = None
    """Folder of the tasks registered at run time, which the replicas watch too."""
    admin_keys: Path | None = None
    """File of the keys that may change tasks."""
    sockets: Sockets | None = None
    """Shared with an Envoy that is started separately; None: plain REST."""
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    limits: Limits = field(default_factory=Limits)


async def serve(options: RouterOptions) -> None:
    """Serve until a signal. DocumentError: invalid pipeline. RuntimeError: no cluster, Envoy or usable TLS identity."""
    if options.sockets is None and (options.edge.authenticates or options.edge.tls):
        raise RuntimeError("--no-proxy cannot be combined with TLS, API keys or JWT: Envoy provides them")
    pipeline = load_pipeline(options.pipeline)
    if options.namespace is not None:
        pipeline = pipeline.with_metadata(namespace=options.namespace)
    tracer = create_tracer(pipeline.name)
    router = Router(pipeline, limits=_create_limits(options, pipeline), tracer=tracer, tls=_replica_tls(options.edge))
    async with AsyncExitStack() as stack:
        files = FileWatcher(router, options.plan, options.endpoints)
        files.read()
        cluster = None if options.endpoints else await _connect(stack)
        stored = None if options.sockets is None else options.sockets.endpoints_file
        watch = files.watch if cluster is None else partial(_watch_cluster, router, cluster, stored)
        watchers: dict[str, Service] = {"plan and endpoints": watch}
        listeners = Listeners(router, HostCheck.at(options.host, options.edge.hosts))
        if options.sockets is not None:
            control = await listeners.listen_behind_envoy(options.sockets, options.edge)
            keys = key_watch(options.edge, cluster, pipeline.metadata.namespace, control.use_keys)
            watchers |= {"API keys": keys} if keys else {}
            watchers["certificates"] = partial(watch_certificates, router.metrics, options.edge, listeners.envoy)
        else:
            log.warning("no proxy: plain REST without TLS, API keys or limits per client; for trusted clients only")
            await listeners.listen_without_proxy(options.host, options.rest_port)
        tasks = await _task_store(router, options.tasks, cluster, watchers)
        await listeners.listen_admin(options.host, options.admin_port, TaskApi(router, tasks, options.admin_keys))
        for what, watch in watchers.items():
            stack.callback(start_service(f"watch of {what}", watch).cancel)
        await _serve_until_stopped(listeners, options.linger_seconds)


async def _task_store(
    router: Router, folder: Path | None, cluster: "Cluster | None", watchers: dict[str, Service]
) -> TaskStore | None:
    """The registered tasks, read. In a cluster, their watch is added to the watchers."""
    if cluster is not None:
        from trimtab_router.ingress.task_config_maps import TaskConfigMaps  # noqa: PLC0415  (as below)

        config_maps = TaskConfigMaps(cluster, router.pipeline)
        store = TaskStore(router, config_maps)
        watchers["registered tasks"] = partial(config_maps.watch, store.apply)
    elif folder is not None:
        store = TaskStore(router, TaskFolder(folder))
    else:
        return None
    with suppress(TimeoutError):  # the API server does not respond; the watch reads them later
        async with asyncio.timeout(TASKS_SECONDS):
            await store.read()
    return store


def _create_limits(options: RouterOptions, pipeline: InferencePipeline) -> Limits:
    sized = replace(
        options.limits,
        max_bytes_in_flight=in_flight_bytes(pipeline, options.edge),
        max_payload_bytes=payload_bytes(pipeline, options.edge),
    )
    return sized.with_client_limits(options.edge.clients)


def _replica_tls(settings: EdgeSettings) -> Tls:
    if settings.replicas is None:
        return lambda: None
    try:
        return MutualTls(settings.replicas).client_context
    except InvalidIdentity as error:
        raise RuntimeError(str(error)) from error


async def _connect(stack: AsyncExitStack) -> "Cluster":
    from trimtab_kubernetes import Cluster, ClusterError  # noqa: PLC0415  (takes a second of processor time to import)

    try:
        return await stack.enter_async_context(await Cluster.connect())
    except ClusterError as error:
        raise RuntimeError(str(error)) from error


async def _watch_cluster(router: Router, cluster: "Cluster", stored: Path | None) -> None:
    from trimtab_router.watchers.cluster_watcher import ClusterWatcher  # noqa: PLC0415  (takes a second of processor time to import)

    await ClusterWatcher(router, cluster, router.pipeline.metadata.namespace, stored).watch()


async def _serve_until_stopped(listeners: Listeners, linger_seconds: float) -> None:
    stopping = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopping.set)
    release_freed_memory()  # of the imports
    print_ready_line(RouterPorts(listeners.rest_port, listeners.admin_port))
    await stopping.wait()
    await listeners.terminate(linger_seconds)
    await listeners.close()
