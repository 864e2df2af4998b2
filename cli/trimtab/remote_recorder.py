"""Recorder of a remote pipeline: polls its routers' admin ports once a second, so that the live page can show it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.kubernetes_access import PLAN, connected
from trimtab.local.counters import Counters
from trimtab.local.router_client import RouterClient
from trimtab.local.supervisor import MAX_FAULTS, Fault
from trimtab.run_record import DECISIONS_FILE, Recorder
from trimtab.run_samples import Sample, stage_samples
from trimtab_pipelines.documents import parse_plan
from trimtab_pipelines.errors import OperationFailed, UserError
from trimtab_pipelines.jsonl import JsonLinesFile
from trimtab_pipelines.kubernetes_names import COMPONENT, PIPELINE_LABEL, ROUTER_ADMIN_PORT
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline

SAMPLE_SECONDS = 1.0
MAX_DECISION_BYTES = 32 * 2**20
FORWARD_SECONDS = 20.0
FetchPlan = Callable[[], Awaitable[PipelinePlan | None]]
Routers = tuple[InferencePipeline, list[RouterClient], FetchPlan | None]
"""A pipeline, its routers, and a function that returns its newest plan."""
Connect = Callable[[], AbstractAsyncContextManager[Routers]]


@dataclass(slots=True)
class RemoteRecorder:
    """Recorder of remote routers."""

    recorder: Recorder
    """Already started."""
    plan: PipelinePlan | None = None
    _decisions: JsonLinesFile = field(init=False)
    _faults: list[Fault] = field(default_factory=list)
    _rejections: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._decisions = JsonLinesFile(self.recorder.folder / DECISIONS_FILE, MAX_DECISION_BYTES)

    async def run(self, connect: Connect) -> None:
        """Sample until cancelled; reconnect after every error, since routers are replaced."""
        while True:
            try:
                async with connect() as (_, routers, fetch_plan):
                    while True:
                        await self.sample_once(routers, fetch_plan)
                        await asyncio.sleep(SAMPLE_SECONDS)
            except (OperationFailed, UserError, OSError):
                await asyncio.sleep(SAMPLE_SECONDS)  # the page shows no new samples meanwhile

    async def sample_once(self, routers: Sequence[RouterClient], fetch_plan: FetchPlan | None) -> None:
        """Record one sample, summed over the routers, and the newest plan.

        Raises RouterUnreachable if a router did not respond; the sample of the others is recorded.
        """
        responses = await asyncio.gather(*(_fetch(router) for router in routers), return_exceptions=True)
        fetched = [response for response in responses if isinstance(response, tuple)]
        if fetched:
            await self._record(fetched, fetch_plan)
        for error in responses:
            if isinstance(error, BaseException):
                raise error

    async def _record(self, fetched: Sequence[tuple[RouterState, Counters]], fetch_plan: FetchPlan | None) -> None:
        plan = await fetch_plan() if fetch_plan else None
        if plan is not None and plan.spec != (self.plan.spec if self.plan else None):
            self._decisions.append(plan.model_dump_json(by_alias=True, exclude_none=True))
            self.plan = plan
        cores = sum(stage.all_cores for stage in self.plan.spec.stages) if self.plan else 0.0
        stages = stage_samples([state for state, _ in fetched])
        self._record_rejections([state for state, _ in fetched])
        sample = Sample(time.time(), stages, cores, 0.0, sum_counters([counters for _, counters in fetched]))
        self.recorder.add(sample, self._faults, 0.0)

    def _record_rejections(self, states: Sequence[RouterState]) -> None:
        rejections = {replica: reason for state in states for replica, reason in state.rejections.items()}
        new = [item for item in rejections.items() if item[0] not in self._rejections]
        self._faults += [Fault(time.time(), f"replica {replica} is not used", reason) for replica, reason in new]
        del self._faults[:-MAX_FAULTS]
        self._rejections = rejections


async def _fetch(router: RouterClient) -> tuple[RouterState, Counters]:
    return await router.state(), await router.counters()


def sum_counters(counters: Sequence[Counters]) -> Counters:
    return Counters(**{name.name: _sum([getattr(c, name.name) for c in counters]) for name in fields(Counters)})


def _sum(values: Sequence[Any]) -> Any:
    """Sum numbers, and mappings by key; a text is that of the first."""
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    return values[0] if isinstance(values[0], str) else sum(values)


@asynccontextmanager
async def cluster_routers(namespace: str, name: str) -> AsyncIterator[tuple[list[RouterClient], FetchPlan]]:
    """Connect to the routers of a pipeline by `kubectl port-forward`.

    Raises StartError if no router runs, or kubectl cannot reach one.
    """
    async with connected() as cluster, AsyncExitStack() as stack:
        pods = await cluster.list("Pod", namespace, f"{PIPELINE_LABEL}={name},{COMPONENT}=router")
        running = [pod["metadata"]["name"] for pod in pods.items if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            raise StartError(f"no router of {namespace}/{name} runs; see kubectl get ipl -n {namespace} {name}")
        ports = [await stack.enter_async_context(_forward_port(namespace, pod)) for pod in running]
        routers = [RouterClient(port) for port in ports]
        for router in routers:
            stack.push_async_callback(router.close)

        async def fetch_plan() -> PipelinePlan | None:
            document = await cluster.get(PLAN, namespace, name)
            return None if document is None else parse_plan(document, f"{PLAN} {namespace}/{name}")

        yield routers, fetch_plan


@asynccontextmanager
async def _forward_port(namespace: str, pod: str) -> AsyncIterator[int]:
    command = ["kubectl", "--namespace", namespace, "port-forward", "--address", "127.0.0.1", f"pod/{pod}"]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, f":{ROUTER_ADMIN_PORT}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise StartError("kubectl is not installed; it forwards the ports of routers in a cluster") from None
    try:
        yield await read_forwarded_port(process, pod)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def read_forwarded_port(process: asyncio.subprocess.Process, pod: str) -> int:
    """Parse kubectl's line `Forwarding from 127.0.0.1:PORT -> 8082`; raises StartError."""
    if process.stdout is None or process.stderr is None:
        raise StartError("the output of kubectl is not piped")
    try:
        async with asyncio.timeout(FORWARD_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
        process.terminate()  # so that reading its stderr ends
    address = line.decode().partition("Forwarding from ")[2].partition(" -> ")[0]
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        output = (await process.stderr.read()).decode().strip() if not line else line.decode().strip()
        raise StartError(f"kubectl cannot reach {pod}: {output or 'no output'}")
    return int(port)
