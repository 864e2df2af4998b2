"""A pipeline in the cluster, observed from outside: its router's state, its pods, its conditions and plans."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tests.e2e.conftest import MANAGER, NAMESPACE, CommandError, Installation
from trimtab.local.counters import Counters
from trimtab_kubernetes import ClusterError
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.kubernetes_names import (
    PIPELINE_LABEL,
    ROUTER_ADMIN_PORT,
    ROUTER_REST_PORT,
    STAGE_LABEL,
    router_admin_name,
    router_name,
)
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.router_state import STATE_PATH, RouterState

POLL_SECONDS = 0.1
SAMPLE_SECONDS = 0.5
REACHED_SECONDS = 15.0
READY_SECONDS = 900.0
T = TypeVar("T")


async def until(
    get: Callable[[], Awaitable[T | None]], what: str, seconds: float, every_seconds: float = POLL_SECONDS
) -> T:
    """Wait until a function returns something true, and return it. A server that does not respond is not yet there."""
    end = time.monotonic() + seconds
    while True:
        with suppress(ClusterError, aiohttp.ClientError, TimeoutError):
            if found := await get():
                return found
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        await asyncio.sleep(every_seconds)


def conditions(found: Object | None) -> dict[str, Mapping[str, Any]]:
    """Conditions of an object by type."""
    return {each["type"]: each for each in ((found or {}).get("status") or {}).get("conditions", [])}


def is_ready(pod: Object) -> bool:
    return conditions(pod).get("Ready", {}).get("status") == "True"


@dataclass(frozen=True, slots=True)
class Sample:
    """Variant, batch size and ready pods of each stage at one moment."""

    variants: Mapping[str, str]
    batch_sizes: Mapping[str, int]
    pods: Mapping[str, int]


def count_changes(samples: list[Sample], values: Callable[[Sample], Mapping[str, Any]]) -> int:
    """How often a stage's value differed from the one before, over all stages."""
    return sum(
        values(before).get(stage) != value
        for before, after in itertools.pairwise(samples)
        for stage, value in values(after).items()
    )


@dataclass(slots=True)
class ObservedPipeline:
    """One pipeline; `address` is HOST:PORT of its REST Service once it is ready."""

    installation: Installation
    name: str
    session: aiohttp.ClientSession
    address: str = ""
    samples: list[Sample] = field(default_factory=list)

    async def document(self) -> Object:
        """The InferencePipeline; empty if it is absent."""
        return await self.installation.cluster.get("InferencePipeline", NAMESPACE, self.name) or {}

    async def plan(self) -> Object:
        """The PipelinePlan; empty if it is absent."""
        return await self.installation.cluster.get("PipelinePlan", NAMESPACE, self.name) or {}

    async def write_plan(self, stage: str, **changes: Any) -> int:
        """Write the plan with one stage changed, as a user may; returns its generation."""
        plan = await self.plan()
        spec = plan["spec"]
        for each in spec["stages"]:
            if each["name"] == stage:
                each.update(changes)
        spec |= {"generation": spec["generation"] + 1, "createdAt": time.time()}
        metadata = {"name": self.name, "namespace": NAMESPACE}
        body = {"apiVersion": plan["apiVersion"], "kind": plan["kind"], "metadata": metadata, "spec": spec}
        await self.installation.cluster.apply(body, manager=MANAGER)
        return int(spec["generation"])

    async def condition(self, kind: str) -> Mapping[str, Any]:
        """A condition; empty if it is absent."""
        return conditions(await self.document()).get(kind, {})

    async def is_ready(self) -> bool:
        return (await self.condition("Ready")).get("status") == "True"

    async def serves(self) -> bool:
        """Whether the router has a ready replica in every stage."""
        return all(stage.ready_replicas > 0 for stage in (await self.state()).stages.values())

    async def wait_until_ready(self, seconds: float) -> None:
        """Give its Envoy a certificate and wait until it is ready."""
        try:
            self.address = await until(self._find_address, f"the Service of {self.name}", seconds)
            await self.renew_certificate()
            await until(self.is_ready, f"Ready of {self.name}", seconds)
        except AssertionError as error:
            found = conditions(await self.document()).items()
            error.add_note("; ".join(f"{k} {c['reason']}: {c['message']}" for k, c in found if c["status"] != "True"))
            raise

    async def renew_certificate(self) -> str:
        """Write a new certificate for its address; returns its serial number."""
        secret, serial = await self.installation.credentials.certificate(NAMESPACE, self.address.rpartition(":")[0])
        await self.installation.apply(secret)
        return serial

    async def _find_address(self) -> str | None:
        with suppress(CommandError):
            return await self.installation.address(router_name(self.name), ROUTER_REST_PORT)
        return None

    async def _admin(self, path: str) -> str:
        address = await self.installation.address(router_admin_name(self.name), ROUTER_ADMIN_PORT)
        async with self.session.get(f"http://{address}{path}", raise_for_status=True) as response:
            return await response.text()

    async def state(self) -> RouterState:
        return RouterState.model_validate_json(await self._admin(STATE_PATH))

    async def counters(self) -> Counters:
        return Counters.parse(await self._admin("/metrics"))

    async def profiles(self) -> dict[str, ModelProfile]:
        """Its profiles by stage."""
        listing = await self.installation.cluster.list("ModelProfile", NAMESPACE)
        profiles = [ModelProfile.model_validate(item) for item in listing.items]
        return {profile.spec.stage: profile for profile in profiles if profile.spec.pipeline == self.name}

    async def pods(self, component: str = "model-server") -> list[Object]:
        """Its pods of a component, except those that terminate."""
        labels = f"{PIPELINE_LABEL}={self.name},app.kubernetes.io/component={component}"
        listing = await self.installation.cluster.list("Pod", NAMESPACE, labels)
        return [pod for pod in listing.items if "deletionTimestamp" not in pod["metadata"]]

    async def take_sample(self) -> None:
        state, pods = await self.state(), await self.pods()
        counts = dict.fromkeys(state.stages, 0)
        for pod in pods:
            counts[pod["metadata"]["labels"][STAGE_LABEL]] += is_ready(pod)
        variants = {name: stage.variant for name, stage in state.stages.items()}
        batch_sizes = {name: stage.batch_size for name, stage in state.stages.items()}
        self.samples.append(Sample(variants, batch_sizes, counts))

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Take samples while the block runs."""

        async def sample() -> None:
            while True:
                with suppress(ClusterError, aiohttp.ClientError, TimeoutError):
                    await self.take_sample()
                await asyncio.sleep(SAMPLE_SECONDS)

        sampling = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling


@asynccontextmanager
async def observed(installation: Installation, name: str) -> AsyncIterator[ObservedPipeline]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2.0)) as session:
        yield ObservedPipeline(installation, name, session)


@asynccontextmanager
async def served(installation: Installation, document: Object, seconds: float) -> AsyncIterator[ObservedPipeline]:
    """Serve a pipeline while the block runs."""
    await installation.apply(document)
    async with observed(installation, document["metadata"]["name"]) as pipeline:
        await pipeline.wait_until_ready(seconds)
        # A node learns of new pods of a Service a moment later than everything else.
        await until(lambda: _accepts(pipeline.address), "the way to its proxy", REACHED_SECONDS)
        yield pipeline
    await installation.cluster.delete("InferencePipeline", NAMESPACE, document["metadata"]["name"])


async def _accepts(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True
