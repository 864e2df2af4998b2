"""Faults of the Kubernetes control plane under a steady load of two routers: an outage, and a store from a backup."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.builders import a_body, a_pipeline, a_plan, a_stage
from tests.control_plane import ControlPlane, control_plane, define
from tests.endurance.callers import Callers, send_through
from tests.endurance.test_faults import ANSWER_SECONDS, CALM_SECONDS, eventually
from tests.figures import Figures
from tests.processes import held_port, own_address, running
from tests.router.fakes import FakeReplica
from tests.router.test_cluster_watcher import a_pod, slice_object
from trimtab_kubernetes import Cluster
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.rendering import crd
from trimtab_pipelines.spec import InferencePipeline

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(900)]

NAMESPACE, SLO_SECONDS, OUTAGE_SECONDS = "default", 1.0, 60.0


@dataclass(slots=True)
class Site:
    """Two routers that watch a control plane, which has a backup of an earlier plan."""

    plane: ControlPlane
    pipeline: InferencePipeline
    ports: list[int]
    """REST of each router, then administration."""
    generation: int = 0

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports[:2]]

    async def write_plan(self, cluster: Cluster) -> None:
        self.generation += 1
        plan = a_plan(self.pipeline, self.generation, replicas=2)
        await cluster.apply(a_body(plan, namespace=NAMESPACE), manager="tests")

    async def is_whole(self, session: aiohttp.ClientSession) -> bool:
        """Whether both routers apply the newest plan and use both replicas."""
        return all([await self._follows(session, port) for port in self.ports[2:]])

    async def _follows(self, session: aiohttp.ClientSession, port: int) -> bool:
        try:
            async with session.get(f"http://127.0.0.1:{port}/trimtab/v1/state") as response:
                state: Any = await response.json()
        except aiohttp.ClientError:
            return False
        ready = state["stages"]["stage-0"]["ready_replicas"]
        return bool(state["plan_generation"] == self.generation and ready == 2)

    async def follow_a_new_plan(self) -> None:
        async with await Cluster.connect(str(self.plane.kubeconfig)) as cluster, aiohttp.ClientSession() as session:
            await self.write_plan(cluster)
            await eventually(lambda: self.is_whole(session))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    pipeline = a_pipeline([a_stage("stage-0", minReplicas=2)], slo={"latency": "1s"})
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(pipeline))
    write_json(tmp_path / "plan.json", a_plan(pipeline, replicas=2))
    async with AsyncExitStack() as stack:
        plane = await asyncio.to_thread(stack.enter_context, control_plane())
        site = Site(plane, pipeline, [stack.enter_context(held_port()) for _ in range(4)])
        async with await Cluster.connect(str(plane.kubeconfig)) as cluster:
            await define(cluster, *crd.render())
            for number in range(2):
                replica = await FakeReplica(name=f"pod-{number}", host=own_address(), delay_seconds=0.005).start()
                stack.push_async_callback(replica.stop)
                pod = a_pod(replica.name, replica.host)
                await cluster.apply(
                    slice_object(NAMESPACE, pod, name=f"replica-{number}", port=replica.port), manager="tests"
                )
            await site.write_plan(cluster)
            await asyncio.to_thread(plane.stop)
            plane.back_up()
            await asyncio.to_thread(plane.start)
        for number in range(2):
            command = [sys.executable, "-m", "trimtab_router", "--cluster", "--no-proxy", "--namespace", NAMESPACE]
            command += ["--pipeline", str(tmp_path / "pipeline.yaml"), "--plan", str(tmp_path / "plan.json")]
            command += ["--rest-port", str(site.ports[number]), "--admin-port", str(site.ports[number + 2])]
            environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig)}
            stack.enter_context(running(command, tmp_path / f"router-{number}.log", tmp_path, environment))
        for _ in range(3):
            await site.follow_a_new_plan()
        yield site


async def outage(site: Site) -> None:
    await asyncio.to_thread(site.plane.stop)
    await asyncio.sleep(OUTAGE_SECONDS)
    await asyncio.to_thread(site.plane.start)


async def restored_store(site: Site) -> None:
    """Its history ends before what the routers know."""
    await asyncio.to_thread(site.plane.stop)
    site.plane.restore()
    await asyncio.to_thread(site.plane.start)


@pytest.mark.parametrize("strike", [outage, restored_store])
async def test_control_plane_fault(site: Site, strike: Callable[[Site], Awaitable[Any]], figures: Figures) -> None:
    callers = Callers(site.addresses, SLO_SECONDS)
    moments = await send_through(callers, partial(strike, site), site.follow_a_new_plan, CALM_SECONDS)
    callers.report(figures, moments.began, ANSWER_SECONDS, moments.whole - moments.struck)
