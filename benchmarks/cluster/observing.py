"""Follows a pipeline from outside while it serves: what its router runs, its pods, its conditions, its plans."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.cluster.setting import POLL_SECONDS, CommandError, Setting
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

SAMPLE_SECONDS = 0.5
REACHED_SECONDS = 15.0


class NotYetError(Exception):
    """Something that did not come within its time."""


async def until(holds: Callable[[], Any], what: str, seconds: float, every_seconds: float = POLL_SECONDS) -> Any:
    """Wait until an awaitable gives something true and return it; NotYetError says what did not come.

    An API server or a router that does not answer counts as not yet.
    """
    end = time.monotonic() + seconds
    while True:
        with suppress(ClusterError, httpx.HTTPError):
            if found := await holds():
                return found
        if time.monotonic() > end:
            raise NotYetError(f"{what} did not come within {seconds:g} s")
        await asyncio.sleep(every_seconds)


def conditions(found: Object | None) -> dict[str, Mapping[str, Any]]:
    """An object's conditions by type."""
    return {each["type"]: each for each in ((found or {}).get("status") or {}).get("conditions", [])}


def told(found: Object | None) -> str:
    """Say in one line what an object's conditions complain of."""
    ill = [f"{k} {c['reason']}: {c['message']}" for k, c in conditions(found).items() if c["status"] != "True"]
    return "; ".join(ill) or "nothing is wrong"


@dataclass(frozen=True, slots=True)
class Seen:
    """What runs at one moment: of each stage the variant, the batch size and the ready pods."""

    at: float
    variants: Mapping[str, str]
    batches: Mapping[str, int]
    pods: Mapping[str, int]


@dataclass(slots=True)
class Watched:
    """One pipeline under observation."""

    setting: Setting
    name: str
    client: httpx.AsyncClient
    address: str = ""
    seen: list[Seen] = field(default_factory=list)

    async def object(self) -> Object | None:
        """The InferencePipeline."""
        return await self.setting.cluster.get("InferencePipeline", self.setting.namespace, self.name)

    async def plan(self) -> Object | None:
        """The PipelinePlan."""
        return await self.setting.cluster.get("PipelinePlan", self.setting.namespace, self.name)

    async def condition(self, kind: str) -> Mapping[str, Any]:
        """A condition; empty where it is not there."""
        return conditions(await self.object()).get(kind, {})

    async def is_ready(self) -> bool:
        """Whether Ready is true."""
        return (await self.condition("Ready")).get("status") == "True"

    async def ready(self, seconds: float) -> None:
        """Give its door a certificate and wait until it is ready; NotYetError tells its complaints."""
        try:
            self.address = await until(self._found, f"the Service of {self.name}", seconds)
            await self.certify()
            await until(self.is_ready, f"Ready of {self.name}", seconds)
        except NotYetError as error:
            raise NotYetError(f"{error}: {told(await self.object())}") from None

    async def certify(self) -> str:
        """Write a new certificate for its address, which is known once there is a Service; return its serial number."""
        namespace, host = self.setting.namespace, self.address.rpartition(":")[0]
        secret, serial = await self.setting.credentials.certificate(namespace, host)
        await self.setting.apply(secret)
        return serial

    async def _found(self) -> str | None:
        with suppress(CommandError):
            return await self.setting.address(self.setting.namespace, router_name(self.name), ROUTER_REST_PORT)
        return None

    async def state(self) -> RouterState:
        """What its router says that it runs."""
        find, namespace = self.setting.address, self.setting.namespace
        address = await find(namespace, router_admin_name(self.name), ROUTER_ADMIN_PORT)
        answer = await self.client.get(f"http://{address}{STATE_PATH}")
        answer.raise_for_status()
        return RouterState.model_validate_json(answer.content)

    async def profiles(self) -> dict[str, ModelProfile]:
        """Its profiles by stage."""
        listing = await self.setting.cluster.list("ModelProfile", self.setting.namespace)
        found = [ModelProfile.model_validate(item) for item in listing.items]
        return {profile.spec.stage: profile for profile in found if profile.spec.pipeline == self.name}

    async def pods(self, component: str = "model-server") -> list[Object]:
        """Its pods of a kind, those that are leaving apart."""
        labels = f"{PIPELINE_LABEL}={self.name},app.kubernetes.io/component={component}"
        listing = await self.setting.cluster.list("Pod", self.setting.namespace, labels)
        return [pod for pod in listing.items if "deletionTimestamp" not in pod["metadata"]]

    async def look(self) -> Seen:
        """Record what runs now."""
        state, pods = await self.state(), await self.pods()
        counts = dict.fromkeys(state.stages, 0)
        for pod in pods:
            if is_ready(pod):
                counts[pod["metadata"]["labels"][STAGE_LABEL]] += 1
        variants = {name: stage.variant for name, stage in state.stages.items()}
        seen = Seen(time.time(), variants, {name: stage.batch_size for name, stage in state.stages.items()}, counts)
        self.seen.append(seen)
        return seen

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Look again and again while the block runs."""

        async def always() -> None:
            while True:
                with suppress(ClusterError, httpx.HTTPError):
                    await self.look()
                await asyncio.sleep(SAMPLE_SECONDS)

        looking = asyncio.create_task(always())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    return conditions(pod).get("Ready", {}).get("status") == "True"


@asynccontextmanager
async def watching(setting: Setting, name: str) -> AsyncIterator[Watched]:
    """Observe a pipeline while the block runs."""
    async with httpx.AsyncClient(timeout=2.0) as client:
        yield Watched(setting, name, client)


@asynccontextmanager
async def served(setting: Setting, pipeline: Object, seconds: float) -> AsyncIterator[tuple[Watched, float]]:
    """A pipeline once it is ready, and how many seconds that took; it is taken away when the block has run through.

    Raises:
        NotYetError: it is not ready within so many seconds; the message tells its complaints.
    """
    name, began = pipeline["metadata"]["name"], time.monotonic()
    await setting.apply(pipeline)
    async with watching(setting, name) as watched:
        await watched.ready(seconds)
        ready_seconds = time.monotonic() - began
        await until(lambda: _reached(watched.address), "the way to its door", REACHED_SECONDS)
        yield watched, ready_seconds
    await setting.cluster.delete("InferencePipeline", setting.namespace, name)


async def _reached(address: str) -> bool | None:
    """Whether a Service leads to somebody; each node learns of new pods a moment after all else has."""
    host, port = address.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return None
    writer.close()
    return True


def changes(seen: list[Seen], what: Callable[[Seen], Mapping[str, Any]]) -> int:
    """Count how often a stage's value differed from the one before, all stages together."""
    return sum(
        what(before).get(stage) != value
        for before, after in itertools.pairwise(seen)
        for stage, value in what(after).items()
    )
