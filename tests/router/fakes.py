"""Fake model server of the data port's protocol over real HTTP, and a router in front of it."""

import asyncio
import io
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import grpc
import numpy as np
import pytest
from aiohttp import web
from opentelemetry.trace import Tracer

from tests import builders
from tests.builders import a_plan
from trimtab.local.envoy_process import EnvoyPorts, make_sockets, wait_for_ports
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.processes.child_process import ChildProcess
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, PendingRequest, Tensor, grpc_messages, rest
from trimtab_protocol.host_check import HostCheck
from trimtab_protocol.mutual_tls import MutualTls
from trimtab_router.admission.request_parsing import parse_request
from trimtab_router.envoy.key_watcher import key_watch
from trimtab_router.envoy.process import command, find_binary, write_config
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.ingress.listeners import EnvoyControl, Listeners
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.limits import Limits
from trimtab_router.request import Call
from trimtab_router.router import Router
from trimtab_router.scheduling.policies.interface import Policy

Model = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
PATIENT = {"timeout": 60_000_000}
"""Parameters of a request that has a minute."""


def plus_one(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"y": (inputs["x"] + 1).astype(inputs["x"].dtype)}


@dataclass
class Seen:
    """One batch a fake served."""

    variant: str
    rows: int
    parameters: dict[str, Any]
    headers: Mapping[str, str]
    id: str


def unbounded_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)


@dataclass
class FakeReplica:
    """A model server of one stage.

    `gate` holds batches back while it is not set, `health` answers to probes. Each of `faults` is answered once, as an
    HTTP status with a message; `refuse` may answer so by what is in the batch. A batch takes `delay_seconds`, or what
    `seconds` says of its operating point and rows. `facts` are what its metadata tell.
    """

    model: Model = plus_one
    variants: Sequence[str] = ("small",)
    name: str = "replica-0"
    delay_seconds: float = 0.0
    seconds: Callable[[str, int], float] | None = None
    faults: list[tuple[int, str]] = field(default_factory=list)
    refuse: Callable[[Mapping[str, np.ndarray]], tuple[int, str] | None] = lambda _: None
    facts: Callable[[], dict[str, Any]] = dict
    seen: list[Seen] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    handler_cancellation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.health = asyncio.Event()
        self.health.set()
        self.probes = 0
        self.unready: set[str] = set()
        self.overload = ""
        self._runner: web.ServerRunner | None = None

    async def start(self) -> "FakeReplica":
        self._runner = web.ServerRunner(
            web.Server(
                self.answer_request,
                access_log=None,
                handler_cancellation=self.handler_cancellation,
                request_factory=unbounded_request,
            ),
            shutdown_timeout=0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def kill(self) -> None:
        """Go away as after kill -9: connections are cut, batches are lost."""
        self.cut()
        assert self._runner is not None
        self.gate.set()
        await self._runner.cleanup()
        self._runner = None

    def cut(self) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        self.gate.set()
        if self._runner is not None:
            await self.kill()

    def endpoint(self, **changes: Any) -> Endpoint:
        return Endpoint(
            **{"name": self.name, "address": f"{self.host}:{self.port}", "variants": tuple(self.variants)} | changes
        )

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        *_, variant, action = request.path.split("/")
        if action == "ready":
            self.probes += 1
            await self.health.wait()
            if self.overload:
                return web.json_response({"ready": False, "reason": self.overload}, status=503)
            known = variant in self.variants and variant not in self.unready
            return web.json_response({"ready": known}, status=200 if known else 404)
        if request.path == f"/v2/models/{action}":
            return web.json_response({"name": action, "parameters": self.facts()})
        asked = rest.decode_request(variant, await request.read(), request.headers.get(rest.HEADER_LENGTH))
        inputs = {tensor.name: tensor.array for tensor in asked.inputs}
        rows = len(next(iter(inputs.values())))
        self.seen.append(Seen(variant, rows, dict(asked.parameters), request.headers, asked.id))
        self.arrived.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            point = str(asked.parameters.get("operating_point", "default"))
            delay_seconds = self.seconds(point, rows) if self.seconds else self.delay_seconds
            if delay_seconds:
                await asyncio.sleep(delay_seconds)
        finally:
            self.running -= 1
        fault = self.faults.pop(0) if self.faults else self.refuse(inputs)
        if fault is not None:
            return web.json_response({"error": fault[1], "id": asked.id}, status=fault[0])
        outputs = tuple(Tensor.of(name, array) for name, array in self.model(inputs).items())
        response = InferResponse(
            variant,
            outputs,
            id=asked.id,
            parameters={
                "operating_point": asked.parameters.get("operating_point", "default"),
                "compute_seconds": delay_seconds,
            },
        )
        buffers, length = rest.encode_response(response, frozenset(tensor.name for tensor in outputs))
        return web.Response(body=b"".join(buffers), headers={rest.HEADER_LENGTH: str(length)})


def a_call(pipeline: InferencePipeline, request: InferRequest, arrived_at: float) -> Call:
    call = parse_request(pipeline.name, pipeline.spec, PendingRequest.of(request))
    call.arrived_at = arrived_at
    return call


async def grpc_refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), str(refused.value.details())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


class Rig:
    """A router with its listeners, and clients of them. Envoy starts on demand."""

    def __init__(
        self,
        router: Router,
        listeners: Listeners,
        session: aiohttp.ClientSession,
        edge: EdgeSettings,
        otlp: str | None = None,
    ) -> None:
        self.router = router
        self.listeners = listeners
        self.session = session
        self.edge = edge
        self.otlp = otlp
        self.sockets: Sockets | None = None
        self.control: EnvoyControl | None = None
        self.url = f"http://127.0.0.1:{listeners.rest_port}"
        self.admin_url = f"http://127.0.0.1:{listeners.admin_port}"
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._proxy_ports: EnvoyPorts | None = None
        self._channel: grpc.aio.Channel | None = None
        self._following: asyncio.Task[None] | None = None

    async def channel(self) -> grpc.aio.Channel:
        ports = await self.proxy()
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}")
        return self._channel

    async def proxy(self) -> EnvoyPorts:
        async with self._opening:
            if self._proxy_ports is None:
                sockets = self.sockets = make_sockets()
                self._stack.callback(shutil.rmtree, sockets.folder)
                control = self.control = await self.listeners.listen_behind_envoy(sockets, self.edge)
                if (keys := key_watch(self.edge, None, "default", control.use_keys)) is not None:
                    self._following = asyncio.create_task(keys())
                most_bytes = self.router.limits.max_payload_bytes
                opening = an_envoy(
                    self.router.pipeline, sockets, self.edge, max_payload_bytes=most_bytes, otlp=self.otlp
                )
                self._proxy_ports = await self._stack.enter_async_context(opening)
            return self._proxy_ports

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.session.close()
        await self.listeners.close()
        await self._stack.aclose()

    until = staticmethod(until)

    async def until_ready(self) -> None:
        await self.until(lambda: self.router.ready)

    def is_ready(self, stage: str, fakes: Sequence[FakeReplica]) -> bool:
        willing = sum(bool(set(fake.variants) - fake.unready) for fake in fakes)
        return bool(self.router.state().stages[stage].ready_replicas == willing)

    async def rest(self, request: InferRequest, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Send a request over REST with binary tensors: status, answer or error text, headers."""
        buffers, length = rest.encode_request(request)
        return await self.post(
            request.model_name, b"".join(bytes(b) for b in buffers), **{rest.HEADER_LENGTH: str(length), **headers}
        )

    async def hold(self, replica: FakeReplica, value: float = 0.0) -> asyncio.Task[Any]:
        """Send a request that the replica holds back until its gate is set."""
        replica.gate.clear()
        held = asyncio.create_task(self.rest(a_request(value=value, parameters=PATIENT)))
        await replica.arrived.wait()
        return held

    async def post(self, model: str, body: bytes, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        url = f"{self.url}/v2/models/{model}/infer"
        async with self.session.post(url, data=io.BytesIO(body), headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                return answer.status, (await answer.json())["error"], answer.headers
            return 200, rest.decode_response(content, answer.headers.get(rest.HEADER_LENGTH)), answer.headers

    async def get(self, path: str) -> tuple[int, Any]:
        base = self.admin_url if path.startswith(("/metrics", "/trimtab", "/readyz", "/livez")) else self.url
        async with self.session.get(base + path) as answer:
            return answer.status, await (answer.text() if path == "/metrics" else answer.json())

    async def grpc(self, request: InferRequest, timeout: float | None = None, metadata: Any = None) -> InferResponse:  # noqa: ASYNC109 - a gRPC deadline
        data = grpc_messages.request_to_message(request).SerializeToString()
        call = (await self.channel()).unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
        answer = await call(data, timeout=timeout, metadata=metadata)
        return grpc_messages.response_from_message(grpc_messages.response_class("ModelInfer").FromString(answer))

    def value(self, name: str, **labels: str) -> float:
        total = 0.0
        for family in self.router.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    async def outcomes(self) -> dict[str, int]:
        counts = {
            outcome: int(self.value("trimtab_requests_total", outcome=outcome))
            for outcome in ("ok", "late", "dropped", "refused", "failed")
        }
        assert sum(counts.values()) == self.value("trimtab_requests_received_total")
        return {outcome: count for outcome, count in counts.items() if count}


@asynccontextmanager
async def an_envoy(
    pipeline: InferencePipeline, sockets: Sockets, settings: EdgeSettings | None = None, **socket_folder: Any
) -> AsyncIterator[EnvoyPorts]:
    otlp = socket_folder.pop("otlp", None)
    settings = settings or EdgeSettings()
    step = SocketFolder(sockets, **socket_folder, chats=pipeline.spec.chat_settings is not None)
    config = write_config(settings, step, pipeline=pipeline.name, otlp=otlp)
    arguments = command(find_binary(), "--config-path", str(config))
    log = sockets.folder / "envoy.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=errors, stderr=errors)
    envoy = ChildProcess(process, "Envoy", log)
    try:
        yield await wait_for_ports(envoy, sockets, 60)
    finally:
        await envoy.stop(10)


@asynccontextmanager
async def a_rig(
    pipeline: InferencePipeline | None = None,
    replicas: Mapping[str, Sequence[FakeReplica]] | None = None,
    *,
    limits: Limits | None = None,
    tracer: Tracer | None = None,
    ready: bool = True,
    edge: EdgeSettings | None = None,
    otlp: str | None = None,
    policy: Policy | None = None,
    registry: Callable[[Router], Awaitable[TaskApi]] | None = None,
    host_check: HostCheck | None = None,
    **plan: Any,
) -> AsyncIterator[Rig]:
    """Run a router; of one stage with one replica if nothing else is given."""
    pipeline, replicas = pipeline or a_pipeline(1), {"stage-0": [FakeReplica()]} if replicas is None else replicas
    fakes = [fake for stage in replicas.values() for fake in stage]
    for fake in fakes:
        await fake.start()
    edge = edge or EdgeSettings()
    limits = limits or Limits().with_client_limits(edge.clients)
    tls = MutualTls(edge.replicas).client_context if edge.replicas else lambda: None
    router = Router(pipeline, a_plan(pipeline, **plan), limits=limits, policy=policy, tracer=tracer, tls=tls)
    router.apply_endpoints(endpoints_of(replicas))
    listeners = Listeners(router, host_check)
    await listeners.listen_without_proxy("127.0.0.1", 0)
    await listeners.listen_admin("127.0.0.1", 0, await registry(router) if registry else None)
    async with aiohttp.ClientSession() as session:
        rig = Rig(router, listeners, session, edge, otlp)
        try:
            if ready:
                await rig.until_ready()
                await rig.until(lambda: all(rig.is_ready(stage, there) for stage, there in replicas.items()))
            yield rig
        finally:
            for fake in fakes:
                fake.gate.set()
            await rig.close()
            for fake in fakes:
                await fake.stop()


def a_pipeline(stages: Sequence[dict[str, Any]] | int = 1, **changes: Any) -> InferencePipeline:
    """A pipeline whose callers have time: how long a test was held up must not decide what is answered."""
    return builders.a_pipeline(stages, **{"slo": {"latency": "60s"}} | changes)


def endpoints_of(replicas: Mapping[str, Sequence[FakeReplica]]) -> Endpoints:
    return Endpoints(stages={stage: tuple(fake.endpoint() for fake in fakes) for stage, fakes in replicas.items()})


def a_request(rows: int = 1, value: float = 0.0, **changes: Any) -> InferRequest:
    x = np.full((rows, 4), value, np.float32)
    return InferRequest(**{"model_name": "sample", "inputs": (Tensor.of("x", x),)} | changes)


def seconds_in(begins: str, message: object) -> float:
    found = re.match(begins.replace("#", r"(-?\d+\.\d{3}) s\b"), str(message))
    assert found is not None, message
    return float(found[1])
