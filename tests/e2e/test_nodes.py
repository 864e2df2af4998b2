"""Pipelines of several hundred replicas on nodes of five flavors, whose load doubles, and whose nodes come and go.

API server, scheduler and controllers are those of Kubernetes; nodes and pods have no machines, so several hundred fit
here. Operator and adapter are processes of their own. `replayed_load` computes attainment.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.builders import a_body, a_pipeline_document, a_point_profile, a_profile, a_stage, a_variant
from tests.control_plane import control_plane, define
from tests.e2e import node
from tests.e2e.conftest import run
from tests.e2e.fake_nodes import KIND, Autoscaler, NodePool, Replicas, kwok, trimtab, workload_controllers
from tests.e2e.observed import conditions, until
from tests.e2e.replayed_load import ReplayedRouter, replay
from tests.figures import Figures
from tests.processes import own_address
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import ZONE
from trimtab_pipelines.documents import parse_flavors, parse_pipeline, parse_plan
from trimtab_pipelines.kubernetes_names import PROFILER_MANAGER, ROUTER_ADMIN_PORT, profile_name
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, profile_tasks
from trimtab_pipelines.rendering import crd
from trimtab_pipelines.request_outcome import FAILED, OK
from trimtab_pipelines.spec import InferencePipeline

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(720)]

NAMESPACE = "trimtab-nodes"
RPS, RISE_SECONDS, FULL_SECONDS = 200.0, 360, 50
"""Load before it doubles, the time that it takes to double, and the time for which it stays doubled."""
NODE_SECONDS = 90.0
SEED = 20
READY_SECONDS, WHOLE_MARGIN_SECONDS = 150.0, 40.0
"""The margin is for a scan of the autoscaler and for a replica's start, with which KWOK may be ten seconds late."""
SPOT_TAINT, NOTICE_SECONDS, RECLAIMED_SHARE = "aws-node-termination-handler/spot-itn", 30.0, 0.2
GPU_NODE_SECONDS, LOST_ZONE = 60.0, "c"
DEVICES = {"l4": "nvidia.com/gpu", "mig": "nvidia.com/mig-1g.10gb"}
FLAVORS: dict[str, dict[str, Any]] = {
    "general": {"nodeStartup": "90s"},
    "undeclared": {},
    "spot": {"nodeStartup": "90s", "spot": True},
    **{
        name: {"device": device, "nodeStartup": "60s", "tolerations": [{"key": device, "operator": "Exists"}]}
        for name, device in DEVICES.items()
    },
}
SERVICE_SECONDS = {"general": 0.6, "undeclared": 0.6, "spot": 0.3, "l4": 0.05, "mig": 0.05}
"""Of one row, by flavor; batches are of one."""
LARGE_POOL = {"headroom": 0.05, "targetUtilization": 1, "scaleDownStabilization": "120s"}
"""Little is kept free, since peaks of such a load are flat. The defaults keep half as much again free, which carries
this rise without planning ahead.
"""
PINNED = {"spot": 155, "l4": 60, "mig": 60}
POOLS = {
    "general": (8, 20, NODE_SECONDS, "ab"),
    "undeclared": (8, 20, NODE_SECONDS, "ab"),
    "spot": (4, 50, NODE_SECONDS, "ab"),
    "l4": (4, 15, GPU_NODE_SECONDS, "abc"),
    "mig": (7, 12, GPU_NODE_SECONDS, "abc"),
}
"""By flavor: replicas a node, nodes at the beginning, seconds until another one is there, zones."""
FLAVOR_OF = {"ahead": "general", "reactive": "undeclared", "spot": "spot"}
"""Of the pipelines of one stage."""
FLAVORS_JSON = json.dumps([{"name": name, "nodeSelector": {KIND: name}, **fields} for name, fields in FLAVORS.items()])


def a_stage_on(flavor: str, source: str = "request.inputs.x") -> dict[str, Any]:
    resources = {"cpu": 1, "memory": "64Mi", "gpu": int(flavor in DEVICES)}
    variant = a_variant(flavor, flavor=flavor, resources=resources, maxBatchSize=1)
    pin = {"pin": {"replicas": PINNED[flavor]}} if flavor in PINNED else {}
    return a_stage(flavor, source, variants=[variant], batchSizes=[1], maxReplicas=500, **pin)


def a_document(name: str, *stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    spec = {"slo": {"latency": "2s"}, "budget": {"cores": "500", "gpus": 200}} | changes
    document = a_pipeline_document(stages, **spec)
    return document | {"metadata": {"name": name, "namespace": NAMESPACE}}


DOCUMENTS = {
    "ahead": a_document("ahead", a_stage_on("general"), adaptation=LARGE_POOL),
    # Without its nodes' startup time nothing is planned ahead of them; its pods may wait for them as long.
    "reactive": a_document(
        "reactive", a_stage_on("undeclared"), adaptation=LARGE_POOL, rollout={"unschedulableGrace": "180s"}
    ),
    "spot": a_document("spot", a_stage_on("spot")),
    "gpus": a_document("gpus", a_stage_on("l4"), a_stage_on("mig", "l4.outputs.y")),
}


@dataclass
class Scene:
    """A cluster of fake nodes, and the pipelines in it."""

    cluster: Cluster
    replicas: Replicas
    autoscaler: Autoscaler
    router: ReplayedRouter

    async def apply(self, name: str) -> None:
        """Apply a pipeline with its profiles."""
        await self.cluster.apply(DOCUMENTS[name], manager="user")
        profiles = profiles_of(name)
        for task in profile_tasks(InferencePipeline.model_validate(DOCUMENTS[name])):
            for stage in task.variants_by_stage:
                marks, called = {FINGERPRINT_ANNOTATION: task.fingerprint}, profile_name(name, stage, task.accelerator)
                body = a_body(profiles[stage], called, NAMESPACE, annotations=marks)
                await self.cluster.apply(body, manager=PROFILER_MANAGER)

    async def statuses(self) -> list[Object]:
        return [each.get("status") or {} for each in (await self.cluster.list("InferencePipeline", NAMESPACE)).items]

    async def are_ready(self) -> bool:
        """Whether all pipelines are ready, with all planned replicas, and enough of them for the load."""
        statuses = await self.statuses()
        stages = [stage for status in statuses for stage in status.get("stages", ())]
        ready = {conditions({"status": status}).get("Ready", {}).get("status") for status in statuses}
        enough = all(self.replicas.serving[flavor] >= RPS * seconds for flavor, seconds in SERVICE_SECONDS.items())
        return enough and ready == {"True"} and all(each["replicas"] <= each["readyReplicas"] for each in stages)

    async def replay(self, name: str, begin: float, seconds: float, *lost: tuple[float, int]) -> SimulationResult:
        """Serve the load of a window by the replicas that were ready in it."""
        instant = parse_flavors(json.dumps([{"name": flavor} for flavor in FLAVORS]))  # replicas that serve have a node
        scenario = Scenario(
            parse_pipeline(DOCUMENTS[name], name, instant),
            profiles_of(name),
            self.router.arrivals(begin, seconds),
            seconds,
            parse_plan(await self.cluster.get("PipelinePlan", NAMESPACE, name), name),
            origin_seconds=begin,
        )
        return await asyncio.to_thread(replay, scenario, self.replicas.timeline[FLAVOR_OF[name]], lost)

    def mean_replicas(self, flavor: str, begin: float, seconds: float) -> float:
        """Mean number of replicas that served in a window."""
        end, known = begin + seconds, self.replicas.timeline[flavor]
        times = [*(min(max(at, begin), end) for at, _ in known), end]
        spans = zip(known, pairwise(times), strict=True)
        return math.fsum(count * (after - at) for (_, count), (at, after) in spans) / seconds


def profiles_of(name: str) -> dict[str, ModelProfile]:
    stages = [stage["name"] for stage in DOCUMENTS[name]["spec"]["stages"]]
    points = {stage: a_point_profile(stage, 0.0, SERVICE_SECONDS[stage]) for stage in stages}
    return {stage: a_profile(stage, [point], name) for stage, point in points.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    await run(node.SCRIPTS / "packages", quiet=False)
    await run(node.SCRIPTS / "build-tools", "kubernetes", "kwok", quiet=False)
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(control_plane())
        stack.callback(keep_logs, plane.folder)
        stack.enter_context(workload_controllers(plane))
        stack.enter_context(kwok(plane))
        cluster = await stack.enter_async_context(await Cluster.connect(str(plane.kubeconfig)))
        await define(cluster, *crd.render())
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await cluster.create(namespace, manager="tests")
        replicas, router = Replicas(cluster, NAMESPACE), ReplayedRouter(RPS, RISE_SECONDS, SEED)
        autoscaler = Autoscaler(cluster, replicas, pools())
        for flavor, (_, count, _, _) in POOLS.items():
            await autoscaler.add(flavor, count)
        await stack.enter_async_context(router.serve(ROUTER_ADMIN_PORT, own_address()))
        stack.enter_context(trimtab(plane, NAMESPACE, FLAVORS_JSON))
        playing = [asyncio.create_task(each) for each in (replicas.watch(), autoscaler.run())]
        yield Scene(cluster, replicas, autoscaler, router)
        await ended(playing)


def pools() -> dict[str, NodePool]:
    return {
        flavor: NodePool(flavor, replicas, seconds, list(zones), DEVICES.get(flavor, ""))
        for flavor, (replicas, _, seconds, zones) in POOLS.items()
    }


def keep_logs(folder: Path) -> None:
    """Keep the processes' logs of the last run."""
    kept = node.CACHE / "nodes"
    kept.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        (kept / log.name).write_bytes(log.read_bytes())


async def ended(tasks: "Sequence[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Doubling:
    """What a pipeline served while the load doubled, and its replicas."""

    served: SimulationResult
    mean_replicas: float
    most_replicas: int


@dataclass(frozen=True)
class Reclaim:
    """What reclaimed spot nodes caused."""

    nodes: int
    replicas: int
    """Replicas that served on them when they were tainted."""
    moved_seconds: float
    lost_replicas: int
    """Replicas that still served on them when they were gone."""
    served: SimulationResult


@dataclass(frozen=True)
class LostZone:
    """What the loss of a zone caused."""

    nodes: int
    lost_replicas: int
    whole_seconds: float


@dataclass(frozen=True)
class Disruptions:
    """What happens to ready pipelines: while their load doubles, spot nodes are reclaimed, then a zone is lost."""

    doubling: "asyncio.Task[dict[str, Doubling]]"
    reclaim: "asyncio.Task[Reclaim]"
    zone: "asyncio.Task[LostZone]"


async def double(scene: Scene) -> dict[str, Doubling]:
    begin, seconds = scene.router.double(), float(RISE_SECONDS + FULL_SECONDS)
    await asyncio.sleep(begin + seconds - time.time())
    doublings = {}
    for name in ("ahead", "reactive"):
        served, flavor = await scene.replay(name, begin, seconds), FLAVOR_OF[name]
        most = max(count for at, count in scene.replicas.timeline[flavor] if at < begin + seconds)
        doublings[name] = Doubling(served, scene.mean_replicas(flavor, begin, seconds), most)
    return doublings


async def reclaim(scene: Scene) -> Reclaim:
    """Reclaim spot nodes with the notice that clouds give, and take them away."""
    spot = scene.autoscaler.named(KIND, "spot")
    names = spot[: math.ceil(RECLAIMED_SHARE * len(spot))]
    nodes, begin, replicas = set(names), time.time(), scene.replicas.on(set(names))
    await scene.autoscaler.taint(names, SPOT_TAINT)
    moved = asyncio.create_task(scene.replicas.until(lambda: not scene.replicas.on(nodes), "moved replicas", 120.0))
    await asyncio.sleep(begin + NOTICE_SECONDS - time.time())
    gone, lost = time.time(), await scene.autoscaler.remove(names)
    moved_seconds = await moved
    await asyncio.sleep(begin + 2 * NOTICE_SECONDS - time.time())
    served = await scene.replay("spot", begin, 2 * NOTICE_SECONDS, (gone, lost))
    return Reclaim(len(names), replicas, moved_seconds, lost, served)


async def lose_zone(scene: Scene, reclaimed: "asyncio.Task[Reclaim]") -> LostZone:
    await asyncio.wait([reclaimed])
    names, replicas = scene.autoscaler.named(ZONE, LOST_ZONE), scene.replicas
    for pool in scene.autoscaler.pools.values():
        pool.zones = [zone for zone in pool.zones if zone != LOST_ZONE]
    lost = await scene.autoscaler.remove(names)

    def is_whole() -> bool:
        return all(replicas.serving[flavor] >= PINNED[flavor] for flavor in DEVICES)

    seconds = await replicas.until(is_whole, "a whole pipeline", GPU_NODE_SECONDS + 3 * WHOLE_MARGIN_SECONDS)
    return LostZone(len(names), lost, seconds)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ready_seconds(scene: Scene) -> float:
    """Seconds from the pipelines' documents until all of them are ready."""
    begun = time.monotonic()
    for name in DOCUMENTS:
        await scene.apply(name)
    try:
        await until(scene.are_ready, "Ready of all pipelines", READY_SECONDS, every_seconds=0.5)
    except AssertionError as error:
        error.add_note(f"{dict(scene.replicas.serving)} serve; {await scene.statuses()}")
        raise
    return time.monotonic() - begun


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disruptions(scene: Scene, ready_seconds: float) -> AsyncIterator[Disruptions]:
    begin = asyncio.create_task
    reclaimed = begin(reclaim(scene))
    tasks = Disruptions(begin(double(scene)), reclaimed, begin(lose_zone(scene, reclaimed)))
    yield tasks
    await ended((tasks.doubling, tasks.reclaim, tasks.zone))


async def test_pipelines_on_five_flavors_are_ready(scene: Scene, ready_seconds: float, figures: Figures) -> None:
    replicas, nodes = dict(scene.replicas.serving), len(scene.autoscaler.nodes)
    figures.add(nodes=nodes, replicas=sum(replicas.values()), pipelines=len(DOCUMENTS), **replicas)

    assert set(replicas) == set(FLAVORS)
    assert {flavor: replicas[flavor] for flavor in PINNED} == PINNED
    figures.require("seconds until ready", ready_seconds, "<=", READY_SECONDS, depends_on_load=True)


async def test_no_request_fails_if_spot_nodes_are_reclaimed(disruptions: Disruptions, figures: Figures) -> None:
    found = await disruptions.reclaim
    figures.add(nodes=found.nodes, replicas=found.replicas, moved_seconds=found.moved_seconds)
    figures.add(attainment=found.served.share(OK), requests=found.served.outcomes.size)

    assert found.replicas > 0
    figures.require("failed", int((found.served.outcomes == FAILED).sum()), "<=", 0)
    figures.require("replicas lost with their node", found.lost_replicas, "<=", 0, depends_on_load=True)


async def test_pipeline_is_whole_after_a_lost_zone(disruptions: Disruptions, figures: Figures) -> None:
    found = await disruptions.zone
    figures.add(nodes=found.nodes, lost_replicas=found.lost_replicas)

    assert found.lost_replicas > 0
    assert found.whole_seconds > GPU_NODE_SECONDS, "no room was left for them on other nodes"
    limit = GPU_NODE_SECONDS + WHOLE_MARGIN_SECONDS
    figures.require("seconds until whole", found.whole_seconds, "<=", limit, depends_on_load=True)


async def test_planning_ahead_carries_a_load_that_doubles(
    scene: Scene, disruptions: Disruptions, figures: Figures
) -> None:
    found = await disruptions.doubling
    for name, doubling in found.items():
        share, mean, most = doubling.served.share(OK), doubling.mean_replicas, doubling.most_replicas
        figures.add(**{f"{name}_attainment": share, f"{name}_mean_replicas": mean, f"{name}_most_replicas": most})
    figures.add(requests=found["ahead"].served.outcomes.size, nodes=len(scene.autoscaler.nodes))
    figures.add(replicas=sum(scene.replicas.serving.values()))

    assert all("schedulable" not in status for status in await scene.statuses()), "replicas on their way were withdrawn"
    assert found["ahead"].served.share(OK) > found["reactive"].served.share(OK)
    figures.require("attainment", found["ahead"].served.share(OK), ">=", 0.98)
