"""Wires a router to its files or its cluster, its doors and its signals; listens, serves, drains."""

import asyncio
import logging
import signal
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.processes.ready_line import RouterPorts, print_ready_line
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.http_client import Tls
from trimtab_protocol.mutual_tls import MutualTls, UnusableIdentity
from trimtab_router.envoy.key_watcher import follow_keys
from trimtab_router.envoy.memory_limits import in_flight_bytes, payload_bytes
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.listeners import Listeners
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.ingress.task_store import TaskStore
from trimtab_router.limits import Limits
from trimtab_router.observability.tracing import configured_tracer
from trimtab_router.router import Router
from trimtab_router.watchers.file_watcher import FileWatcher

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What the command line says; port 0 lets the system choose.

    Without `endpoints` the replicas, and every plan after the first, are what the cluster's API says. `namespace` is
    where the pipeline lives, if the file does not say so. `linger_seconds` is how long a router that was told to stop
    takes requests, not ready any more. With `sockets` callers come through Envoy, which is started by others; without
    them over plain REST, on `rest_port`. `tasks` is the folder of the tasks that are registered while it runs, which
    its replicas follow too; `admin_keys` the file of those who may.
    """

    pipeline: Path
    plan: Path
    endpoints: Path | None
    namespace: str | None = None
    linger_seconds: float = 0.0
    host: str = "127.0.0.1"
    rest_port: int = 0
    admin_port: int = 0
    tasks: Path | None = None
    admin_keys: Path | None = None
    sockets: Sockets | None = None
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    limits: Limits = field(default_factory=Limits)


async def serve(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        DocumentError: the pipeline cannot be used.
        RuntimeError: there is no cluster to follow, nobody who would check the keys that are asked for, or an identity
            that cannot be used.
    """
    if options.sockets is None and (options.edge.authenticates or options.edge.tls):
        raise RuntimeError(
            "the door checks keys and tokens and ends TLS: without one (--edge none) there is none of it"
        )
    pipeline = _within(load_pipeline(options.pipeline), options.namespace)
    tracer = configured_tracer(pipeline.name)
    router = Router(pipeline, limits=_limits(options, pipeline), tracer=tracer, tls=_identity(options.edge))
    async with AsyncExitStack() as stack:
        files = FileWatcher(router, options.plan, options.endpoints)
        files.read()
        cluster = None if options.endpoints else await _connect(stack)
        following = [files.watch() if cluster is None else _follow_cluster(router, cluster)]
        doors = Listeners(router)
        if options.sockets is not None:
            control = await doors.open_behind_envoy(options.sockets, options.edge)
            keys = follow_keys(options.edge, cluster, pipeline.metadata.namespace, control.use_keys)
            following += [keys] if keys else []
        else:
            log.warning(
                "no Envoy in front: REST only, without TLS, keys or limits for each client; for trusted callers"
            )
            await doors.open_alone(options.host, options.rest_port)
        await doors.open_admin(options.host, options.admin_port, _registry(router, options))
        await _serve_until_stopped(doors, _all(following), options.linger_seconds)


def _registry(router: Router, options: RouterOptions) -> TaskApi:
    """The registry of tasks, those that were registered before included."""
    if options.tasks is None:
        return TaskApi(router, None, options.admin_keys)
    book = TaskStore(router, options.tasks)
    book.read()
    return TaskApi(router, book, options.admin_keys)


def _limits(options: RouterOptions, pipeline: InferencePipeline) -> Limits:
    """The bounds that the pipeline's memory and the door's settings set."""
    sized = replace(
        options.limits,
        max_bytes_in_flight=in_flight_bytes(pipeline, options.edge),
        max_payload_bytes=payload_bytes(pipeline, options.edge),
    )
    return sized.with_clients(options.edge.clients)


def _identity(settings: EdgeSettings) -> Tls:
    """What connections to replicas are secured with."""
    if settings.replicas is None:
        return lambda: None
    try:
        return MutualTls(settings.replicas).connecting
    except UnusableIdentity as error:
        raise RuntimeError(str(error)) from error


async def _connect(stack: AsyncExitStack) -> "Cluster":
    from trimtab_kubernetes import Cluster, ClusterError  # noqa: PLC0415  (takes a second of processor time to import)

    try:
        return await stack.enter_async_context(await Cluster.connect())
    except ClusterError as error:
        raise RuntimeError(str(error)) from error


def _follow_cluster(router: Router, cluster: "Cluster") -> Awaitable[None]:
    from trimtab_router.watchers.cluster_watcher import ClusterWatcher  # noqa: PLC0415  (takes a second of processor time to import)

    return ClusterWatcher(router, cluster, router.pipeline.metadata.namespace).watch()


def _all(following: list[Awaitable[None]]) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(asyncio.gather(*following))


async def _serve_until_stopped(doors: Listeners, watching: "asyncio.Future[Any]", linger_seconds: float) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    print_ready_line(RouterPorts(doors.rest_port, doors.admin_port))
    stopped = asyncio.create_task(stopping.wait())
    first: set[asyncio.Future[Any]] = {stopped, watching}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        await doors.leave(linger_seconds)
    await doors.close()
    stopped.cancel()
    if watching.done():
        watching.result()  # a watcher that failed is an error of the process
    watching.cancel()
    await asyncio.gather(watching, stopped, return_exceptions=True)


def _within(pipeline: InferencePipeline, namespace: str | None) -> InferencePipeline:
    if namespace is None:
        return pipeline
    return pipeline.model_copy(update={"metadata": pipeline.metadata.model_copy(update={"namespace": namespace})})
