"""Upgrade from the previous version to this one and rollback, part by part.

No request fails while routers and replicas are replaced under a load. Operator, adapter and CRDs of each version run
against an API server and accept what the others write.

`TRIMTAB_PREVIOUS` names the commit of the previous version.
"""

import asyncio
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from subprocess import check_output
from typing import Any

import aiohttp
import pytest
import yaml

from tests.adapter.clusters import a_pipeline_of, condition, put, routed, seen
from tests.adapter.scenes import FakeRouter
from tests.adapter.test_cluster import having
from tests.builders import a_pipeline, a_plan, a_point_profile, a_profile, a_stage, a_variant
from tests.control_plane import define
from tests.endurance.callers import BODY, PATH, RATE_RPS, Callers, sending
from tests.figures import Figures
from tests.local_run import chat_pipeline
from tests.processes import held_port, running
from trimtab_kubernetes import Cluster
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.spec import InferencePipeline

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PIPELINE, PROFILES = "pipeline.yaml", "profiles.yaml"
PREVIOUS = os.environ.get("TRIMTAB_PREVIOUS", "8dd8d9c6")
"""Default: the first commit since the release of 0.2.0 of which every part starts."""
ROUTERS, REPLICAS = ("router-a", "router-b"), ("replica-a", "replica-b")
ORDER = (ROUTERS[0], REPLICAS[0], "adapter", REPLICAS[1], ROUTERS[1])
"""Between its steps routers of each version send to replicas of each, and read the plans of adapters of each."""
CALM_SECONDS, LINGER_SECONDS, PATIENCE_SECONDS = 2.0, 1.0, 90.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "how many"}], "max_tokens": 4}


@dataclass(frozen=True, slots=True)
class Version:
    """A checkout whose packages a process imports."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        packages = [str(path) for path in self.folder.iterdir() if path.is_dir() and path.name != "tests"]
        return os.environ | {"PYTHONPATH": os.pathsep.join(packages), "PYTHONSAFEPATH": "1"}

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """CRDs of its chart."""
        folder = self.folder / "charts" / "trimtab" / "charts" / "trimtab-crds" / "templates"
        return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]

    @property
    def router_options(self) -> tuple[str, ...]:
        text = (self.folder / "router" / "trimtab_router" / "__main__.py").read_text()
        return ("--no-proxy",) if "--no-proxy" in text else ()


@dataclass(slots=True)
class Site:
    """Two routers, two replicas and an adapter, each of a version of its own."""

    folder: Path
    pipeline: InferencePipeline
    session: aiohttp.ClientSession
    ports: Mapping[str, int]
    admin_ports: Mapping[str, int]
    callers: Callers
    stacks: dict[str, ExitStack] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    started: int = 0

    async def replace(self, part: str, version: Version) -> None:
        """Replace a part as a rolling update does: requests have another part before it ends."""
        if part in ROUTERS:
            await self._replace_router(part, version)
        elif part in REPLICAS:
            await self._replace_replica(part, version)
        else:
            await self._replace_adapter(version)

    async def _replace_router(self, name: str, version: Version) -> None:
        address = f"127.0.0.1:{self.ports[name]}"
        self.callers.addresses = [other for other in self.callers.addresses if other != address]
        await self._stop(name)
        files = [f"--{name}={self.folder / name}.json" for name in ("plan", "endpoints")]
        files += [f"--pipeline={self.folder / PIPELINE}", f"--linger-seconds={LINGER_SECONDS}"]
        ports = ("--rest-port", self.ports[name], "--admin-port", self.admin_ports[name])
        self._start(name, version, "trimtab_router", *files, *ports, *version.router_options)
        await self._until_routed(name)
        self.callers.addresses = [*self.callers.addresses, address]

    async def _replace_replica(self, name: str, version: Version) -> None:
        previous, self.started = self.endpoints.get(name), self.started + 1
        stage = self.pipeline.spec.stages[0]
        spec = model_spec(self.pipeline, self.folder, stage, stage.variants[0], 1.0)
        models = json.dumps([spec.model_dump(mode="json", by_alias=True, exclude_none=True)])
        stack, port = ExitStack(), 0
        with held_port() as data, held_port() as http, held_port() as grpc:
            port = data
            ports = ("--data-port", data, "--http-port", http, "--grpc-port", grpc)
            unique = f"{name}-{self.started}"
            command = ("trimtab_model_servers", "--models-env", "MODELS", *ports)
            self._run(stack, unique, version, *command, MODELS=models)
            await self._until_ok(f"http://127.0.0.1:{port}/v2/models/{spec.name}/ready")
        endpoint = Endpoint(name=unique, address=f"127.0.0.1:{port}", variants=(spec.name,))
        self.endpoints[name] = endpoint
        self._write_endpoints(*([previous.replace(draining=True)] if previous else []))
        if previous:
            for router in ROUTERS:
                await self._until_routed(router)
            await asyncio.sleep(LINGER_SECONDS)
            await self._stop(name)
            self._write_endpoints()
        self.stacks[name] = stack

    async def _replace_adapter(self, version: Version) -> None:
        """It plans from the state of a router, and decides before the next part is replaced."""
        await self._stop("adapter")
        decisions = self.folder / "decisions.jsonl"
        size = decisions.stat().st_size if decisions.exists() else 0
        files = [f"--pipeline={self.folder / PIPELINE}", f"--profiles={self.folder / PROFILES}"]
        files += [f"--plan={self.folder / 'plan.json'}", f"--decisions={decisions}"]
        router = f"http://127.0.0.1:{self.admin_ports[ROUTERS[0]]}"
        self._start("adapter", version, "trimtab_adapter", *files, "--router", router)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not decisions.exists() or decisions.stat().st_size == size:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)

    def _start(self, name: str, version: Version, *command: object) -> None:
        self.stacks[name] = ExitStack()
        self._run(self.stacks[name], name, version, *command)

    def _run(self, stack: ExitStack, name: str, version: Version, *command: object, **variables: str) -> None:
        words = [sys.executable, "-m", *map(str, command)]
        log = self.folder / f"{name}-{version.folder.name}.log"
        stack.enter_context(running(words, log, self.folder, version.environment | variables))

    async def _stop(self, name: str) -> None:
        await asyncio.to_thread(self.stacks.pop(name, ExitStack()).close)

    def _write_endpoints(self, *others: Endpoint) -> None:
        self.started += 1
        stages = {self.pipeline.spec.stages[0].name: (*self.endpoints.values(), *others)}
        write_json(self.folder / "endpoints.json", Endpoints(generation=self.started, stages=stages))

    async def _until_routed(self, router: str) -> None:
        """Wait until a router uses the replicas."""
        url = f"http://127.0.0.1:{self.admin_ports[router]}/trimtab/v1/state"
        names = {endpoint.name for endpoint in self.endpoints.values()}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                state = await self._get(url)
                (stage,) = state["stages"].values() if state else ({"endpoints": {}},)
                if names <= {name for name, one in stage["endpoints"].items() if one["ready"]}:
                    return
                await asyncio.sleep(0.05)

    async def _until_ok(self, url: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self._get(url) is None:  # noqa: ASYNC110 - no event of another process
                await asyncio.sleep(0.1)

    async def _get(self, url: str) -> Any:
        """JSON at a URL, None without a response."""
        try:
            async with self.session.get(url) as response:
                return json.loads(await response.text() or "{}") if response.status == 200 else None
        except aiohttp.ClientError:
            return None


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Version:
    try:
        archive = check_output(["git", "-C", str(ROOT), "archive", PREVIOUS])
    except (OSError, ValueError) as error:
        pytest.skip(f"commit {PREVIOUS} of the previous version is not here: {error}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return Version(folder)


def tensors(folder: Path) -> tuple[InferencePipeline, Callers]:
    variant = a_variant("small", resources={"cpu": "500m", "memory": "256Mi"})
    stage = a_stage("only", "request.inputs.x", variants=[variant], batchSizes=[1, 2, 4, 8], pin={"replicas": 2})
    pipeline = a_pipeline([stage], budget={"cores": "2"}, slo={"latency": "1s"})
    profile = a_profile("only", [a_point_profile("small", cores=0.5)])
    (folder / PROFILES).write_text(dump_yaml(profile))
    return pipeline, Callers([], 1.0, PATH, BODY, RATE_RPS)


def chats(_: Path) -> tuple[InferencePipeline, Callers]:
    return chat_pipeline(), Callers([], 60.0, "/v1/chat/completions", CHAT, 10.0)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with ExitStack() as held:
        yield [held.enter_context(held_port()) for _ in range(4)]


@pytest.mark.parametrize("kind", [tensors, chats])
async def test_no_request_fails(
    tmp_path: Path, previous: Version, ports: list[int], kind: Any, figures: Figures
) -> None:
    this = Version(ROOT)
    pipeline, callers = kind(tmp_path)
    (tmp_path / PIPELINE).write_text(dump_yaml(pipeline))
    write_json(tmp_path / "plan.json", a_plan(pipeline, replicas=2, batchSize=pipeline.spec.stages[0].batch_sizes[-1]))
    write_json(tmp_path / "endpoints.json", Endpoints(generation=0, stages={}))
    order = [part for part in ORDER if kind is tensors or part != "adapter"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        numbers = dict(zip(ROUTERS, ports[:2], strict=True)), dict(zip(ROUTERS, ports[2:], strict=True))
        site = Site(tmp_path, pipeline, session, *numbers, callers)
        try:
            for part in sorted(order, key=lambda name: name not in REPLICAS):  # replicas come first, the adapter last
                await site.replace(part, previous)
            async with sending(callers):
                began = asyncio.get_running_loop().time()
                for version in (this, previous):
                    for part in order:
                        await asyncio.sleep(CALM_SECONDS)
                        await site.replace(part, version)
                await asyncio.sleep(CALM_SECONDS)
        finally:
            for stack in site.stacks.values():
                stack.close()
    callers.report(figures, began, bound_seconds=float("inf"))
    figures.require("retried requests", sum(call.tries > 1 for call in callers.calls), "==", 0)


REFUSALS = {"InvalidSpec", "PlanRejected", "ReconcileFailed", "FieldNotApplied", "WriteRejected"}
STEPS = ("PPP", "TPP", "TTP", "TTT", "TPT", "TPP", "PPP", "PTT")
"""Version of CRDs, operator and adapter: the previous one or this one."""


async def test_control_plane_of_each_version_accepts_the_other(
    tmp_path: Path, previous: Version, kubeconfig: Path, cluster: Cluster, namespace: str, figures: Figures
) -> None:
    """Each adapter plans for each load, and each operator applies the plan, whose Deployments it does not replace."""
    versions = {"P": previous, "T": Version(ROOT)}
    variables = {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": namespace, "TRIMTAB_NAMESPACES": namespace}
    uids: set[str] = set()
    async with FakeRouter().serve(host="0.0.0.0") as router:
        await routed(cluster, namespace, "sample", router)
        for number, step in enumerate(STEPS):
            definitions, operator, adapter = (versions[letter] for letter in step)
            await define(cluster, *definitions.definitions)
            await put(cluster, a_pipeline_of(namespace, budget={"cores": 16 + number}), profiled=not number)
            load_rps = 5.0 * 2**number  # each step outgrows the plan of the one before
            router.offer(load_rps)
            with ExitStack() as stack:
                held = [str(stack.enter_context(held_port())) for _ in range(4)]
                ports = {
                    "TRIMTAB_HEALTH_PORT": held[0],
                    "TRIMTAB_METRICS_PORT": held[1],
                    "POD_NAME": f"{step}-{number}",
                }
                command = [sys.executable, "-m", "trimtab_operator"]
                environment = operator.environment | variables | ports
                stack.enter_context(running(command, tmp_path / f"operator-{step}.log", tmp_path, environment))
                command = [sys.executable, "-m", "trimtab_adapter", "--cluster", "--namespaces", namespace]
                command += ["--health-port", held[2], "--metrics-port", held[3]]
                environment = adapter.environment | variables | ports
                stack.enter_context(running(command, tmp_path / f"adapter-{step}.log", tmp_path, environment))
                decided = having(("spec", "forecast", "observedRps"), load_rps)
                await seen(cluster, "PipelinePlan", namespace, "sample", decided)
                found = await seen(cluster, "InferencePipeline", namespace, "sample", is_judged)
            reasons = {one["reason"] for one in found["status"]["conditions"]}
            figures.add(**{f"refusals_{number}_{step}": len(reasons & REFUSALS)})
            assert not reasons & REFUSALS, (step, found["status"])
            stored = await cluster.list("Deployment", namespace)
            uids |= {one["metadata"]["uid"] for one in stored.items if one["metadata"]["name"] == "sample-router"}
    await define(cluster, *versions["T"].definitions)
    assert len(uids) == 1, "the router's Deployment is updated, not replaced"


def is_judged(pipeline: dict[str, Any]) -> bool:
    """Whether the operator has read the newest pipeline and its plan."""
    applied = condition(pipeline, "PlanApplied")
    newest: bool = applied.get("observedGeneration") == pipeline["metadata"]["generation"]
    return newest and applied["reason"] != "AwaitingPlan"
