"""Shell: keeps the record of a pipeline that something else runs, so that the same page can show it.

Its routers are asked once a second at their administrative ports, wherever these can be reached.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from trimtab.kubernetes_access import PLAN, connected
from trimtab.local.router_client import Counters, RouterClient
from trimtab.run_record import DECISIONS_FILE, Recorder
from trimtab.run_samples import Sample, StageSample
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
NewestPlan = Callable[[], Awaitable[PipelinePlan | None]]
Routers = tuple[InferencePipeline, list[RouterClient], NewestPlan | None]
"""A pipeline, its routers, and who knows its newest plan."""
Reach = Callable[[], AbstractAsyncContextManager[Routers]]


@dataclass(slots=True)
class RemoteRecorder:
    """The record of routers elsewhere.

    Attributes:
        record: begun already.
    """

    recorder: Recorder
    plan: PipelinePlan | None = None
    _decisions: JsonLinesFile = field(init=False)

    def __post_init__(self) -> None:
        self._decisions = JsonLinesFile(self.recorder.folder / DECISIONS_FILE, MAX_DECISION_BYTES)

    async def run(self, reach: Reach) -> None:
        """Ask until cancelled. Whatever fails is reached anew: routers are replaced, and ways to them end with them."""
        while True:
            try:
                async with reach() as (_, routers, newest_plan):
                    while True:
                        await self.sample_once(routers, newest_plan)
                        await asyncio.sleep(SAMPLE_SECONDS)
            except (OperationFailed, UserError, OSError):
                await asyncio.sleep(SAMPLE_SECONDS)  # the page shows that nothing comes

    async def sample_once(self, routers: Sequence[RouterClient], newest_plan: NewestPlan | None) -> None:
        """Take one sample of what the routers tell, added up, and the plan where somebody knows a newer one.

        Raises RouterUnreachable where one of them does not answer, having kept what the others told.
        """
        told = await asyncio.gather(*(_asked(router) for router in routers), return_exceptions=True)
        found = [answer for answer in told if isinstance(answer, tuple)]
        if found:
            await self._keep(found, newest_plan)
        for error in told:
            if isinstance(error, BaseException):
                raise error

    async def _keep(self, found: Sequence[tuple[RouterState, Counters]], newest_plan: NewestPlan | None) -> None:
        plan = await newest_plan() if newest_plan else None
        if plan is not None and plan.spec != (self.plan.spec if self.plan else None):
            self._decisions.append(plan.model_dump_json(by_alias=True, exclude_none=True))
            self.plan = plan
        cores = sum(stage.cores * stage.replicas for stage in self.plan.spec.stages) if self.plan else 0.0
        stages = _stages([state for state, _ in found])
        self.recorder.add(Sample(time.time(), stages, cores, 0.0, sum_counters([c for _, c in found])), (), 0.0)


async def _asked(router: RouterClient) -> tuple[RouterState, Counters]:
    return await router.state(), await router.counters()


def _stages(states: Sequence[RouterState]) -> dict[str, StageSample]:
    """What the stages run by the first router; rows wait at each of them."""
    return {
        name: StageSample(
            stage.variant,
            stage.batch_size,
            max(state.stages[name].ready_replicas for state in states if name in state.stages),
            sum(state.stages[name].queue_rows for state in states if name in state.stages),
        )
        for name, stage in states[0].stages.items()
    }


def sum_counters(counters: Sequence[Counters]) -> Counters:
    """Add up what several routers counted."""

    def summed(mappings: Sequence[Mapping[str, int]]) -> dict[str, int]:
        names = dict.fromkeys(name for mapping in mappings for name in mapping)
        return {name: sum(mapping.get(name, 0) for mapping in mappings) for name in names}

    return Counters(
        received=sum(each.received for each in counters),
        outcomes=summed([each.outcomes for each in counters]),
        drops=summed([each.drops for each in counters]),
        latency_buckets=_added_buckets([each.latency_buckets for each in counters]),
        accuracy_sum=sum(each.accuracy_sum for each in counters),
        accuracy_count=sum(each.accuracy_count for each in counters),
        client_errors=sum(each.client_errors for each in counters),
        pipeline=counters[0].pipeline,
        first_token_buckets=_added_modalities([each.first_token_buckets for each in counters]),
        next_token_buckets=_added_modalities([each.next_token_buckets for each in counters]),
    )


def _added_modalities(each: Sequence[Mapping[str, Mapping[float, float]]]) -> dict[str, Mapping[float, float]]:
    modalities = dict.fromkeys(modality for buckets in each for modality in buckets)
    return {modality: _added_buckets([buckets.get(modality, {}) for buckets in each]) for modality in modalities}


def _added_buckets(each: Sequence[Mapping[float, float]]) -> dict[float, float]:
    edges = sorted({edge for buckets in each for edge in buckets})
    return {edge: sum(buckets.get(edge, 0.0) for buckets in each) for edge in edges}


@asynccontextmanager
async def cluster_routers(namespace: str, name: str) -> AsyncIterator[tuple[list[RouterClient], NewestPlan]]:
    """Reach the routers of a pipeline by `kubectl port-forward`, which needs no more rights than kubectl has.

    Raises:
        StartError: there are none, or kubectl cannot reach them.
    """
    async with connected() as cluster, AsyncExitStack() as stack:
        pods = await cluster.list("Pod", namespace, f"{PIPELINE_LABEL}={name},{COMPONENT}=router")
        running = [pod["metadata"]["name"] for pod in pods.items if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            raise StartError(f"no router of {namespace}/{name} runs; see kubectl get ipl -n {namespace} {name}")
        ports = [await stack.enter_async_context(_forwarded(namespace, pod)) for pod in running]
        routers = [RouterClient(port) for port in ports]
        for router in routers:
            stack.push_async_callback(router.close)

        async def newest_plan() -> PipelinePlan | None:
            found = await cluster.get(PLAN, namespace, name)
            return None if found is None else parse_plan(found, f"{PLAN} {namespace}/{name}")

        yield routers, newest_plan


@asynccontextmanager
async def _forwarded(namespace: str, pod: str) -> AsyncIterator[int]:
    command = ["kubectl", "--namespace", namespace, "port-forward", "--address", "127.0.0.1", f"pod/{pod}"]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, f":{ROUTER_ADMIN_PORT}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise StartError("routers in a cluster are reached by kubectl, which is not here; install it") from None
    try:
        yield await _port_of(process, pod)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _port_of(process: asyncio.subprocess.Process, pod: str) -> int:
    """Read `Forwarding from 127.0.0.1:PORT -> 8082`."""
    if process.stdout is None or process.stderr is None:
        raise StartError("kubectl has no output to read")
    try:
        line = await asyncio.wait_for(process.stdout.readline(), FORWARD_SECONDS)
    except TimeoutError:
        line = b""
        process.terminate()  # else what it wrote has no end
    address = line.decode().partition("Forwarding from ")[2].partition(" -> ")[0]
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        said = (await process.stderr.read()).decode().strip() if not line else line.decode().strip()
        raise StartError(f"kubectl cannot reach {pod}: {said or 'it says nothing'}")
    return int(port)
