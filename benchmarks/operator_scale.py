"""Benchmark of the operator with 300 pipelines: its time, memory, and requests to the API server.

The API server is real and has no nodes, so all objects are written and no pod runs. The operator then restarts: that
pass, and the next periodic one, have nothing to change and must write nothing.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.report import Report
from benchmarks.router.processes import free_port, usage
from tests import control_plane
from tests.builders import a_pipeline_document, a_plan, a_point_profile, a_profile
from trimtab_kubernetes import Cluster, NotFound, list_and_watch
from trimtab_kubernetes.kinds import kind_of
from trimtab_operator.manifests.objects import OWN_KINDS, OWNED_KINDS
from trimtab_pipelines.kubernetes_names import profile_name, replica_group_name
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, profile_tasks
from trimtab_pipelines.rendering import crd
from trimtab_pipelines.spec import InferencePipeline

STAGES = 3
NAMESPACES = 10
OBJECTS_PER_PIPELINE = STAGES + 1
AT_ONCE = 16
CHANGES = 100
MAX_SECONDS, MAX_IDLE_CPU_SECONDS, MAX_MIB = 900.0, 2.0, 300.0
MAX_WRITES_PER_PIPELINE = 30
OWN_READS = 3
"""Of this benchmark, in the first pass."""
SERVER_REQUESTS = "apiserver_request_total{"
RECONCILES = "trimtab_reconciles_total"
READS, WRITES = {"GET", "LIST", "WATCH"}, {"POST", "PUT", "PATCH", "APPLY", "DELETE"}
RESOURCES = {kind_of(kind).plural for kind in (*OWN_KINDS, *OWNED_KINDS, "Event")}


@dataclass(frozen=True, slots=True)
class Pass:
    """Cost of one run of the operator process."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    reads: float
    writes: float
    reconciled: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks operator", description=__doc__)
    parser.add_argument("--pipelines", type=int, default=300)
    count = parser.parse_args().pipelines
    with control_plane.api_server() as kubeconfig:
        passes, changes = asyncio.run(_measure(kubeconfig, count))
    report = Report("bench-operator", {"pipelines": count, "stages_each": STAGES, "load_average": os.getloadavg()[0]})
    for name, cost in passes.items():
        report.add(
            {
                f"{name}_seconds": round(cost.seconds, 1),
                f"{name}_cpu_seconds": round(cost.cpu_seconds, 2),
                f"{name}_peak_mib": round(cost.peak_mib, 1),
                f"{name}_reads_per_pipeline": round(cost.reads / count, 2),
                f"{name}_writes_per_pipeline": round(cost.writes / count, 2),
            }
        )
        report.hold(f"pipelines_reconciled_{name}", cost.reconciled, ">=", count)
    report.add({"change_applied_p50_seconds": round(float(np.median(changes)), 3)})
    report.hold("change_applied_p99_seconds", round(float(np.percentile(changes, 99)), 3), "<=", 1)
    report.hold("writes_per_pipeline", passes["first"].writes / count, "<=", MAX_WRITES_PER_PIPELINE)
    report.hold("writes_after_restart", passes["restart"].writes, "==", 0)
    report.hold("writes_of_an_idle_pass", passes["idle"].writes, "==", 0)
    report.hold("cpu_seconds_of_an_idle_pass", round(passes["idle"].cpu_seconds, 2), "<=", MAX_IDLE_CPU_SECONDS)
    report.hold("peak_mib", round(max(cost.peak_mib for cost in passes.values()), 1), "<=", MAX_MIB)
    return report.finish()


async def _measure(kubeconfig: Path, count: int) -> tuple[dict[str, Pass], list[float]]:
    """Measure a first pass, one after a restart, one in which nothing changed, and seconds to apply changed plans."""
    async with await Cluster.connect(str(kubeconfig)) as cluster, aiohttp.ClientSession() as session:
        with Progress(console=Console(stderr=True)) as progress:
            await _define(cluster)
            documents = [_pipeline(n) for n in range(count)]
            await _apply_all(cluster, documents, progress)
            server, passes = Server(session, _address(kubeconfig)), {}
            async with _operator(session, kubeconfig) as operator:
                passes["first"] = await _first_pass(cluster, server, operator, count, progress)
            async with _operator(session, kubeconfig) as operator:
                for name in ("restart", "idle"):
                    passes[name] = await _next_pass(server, operator, count, progress)
                changes = await _change_plans(cluster, documents[:: max(1, count // CHANGES)], progress)
    return passes, changes


def _pipeline(number: int) -> InferencePipeline:
    document = a_pipeline_document(STAGES)
    document["metadata"] = {"name": f"pipeline-{number}", "namespace": f"scale-{number % NAMESPACES}"}
    return InferencePipeline.model_validate(document)


async def _define(cluster: Cluster) -> None:
    for definition in crd.render():
        await cluster.apply(definition, manager="benchmark")
    for namespace in range(NAMESPACES):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"scale-{namespace}"}}
        await cluster.apply(body, manager="benchmark")
    for kind in ("InferencePipeline", "ModelProfile", "PipelinePlan"):
        while True:
            try:
                await cluster.list(kind)
            except NotFound:
                await asyncio.sleep(0.1)  # a kind is served some moments after it is defined
            else:
                break


async def _apply_all(cluster: Cluster, pipelines: list[InferencePipeline], progress: Progress) -> None:
    """Write every pipeline, its profiles and its plan."""
    task = progress.add_task("pipelines applied", total=len(pipelines))
    gate = asyncio.Semaphore(AT_ONCE)

    async def apply(pipeline: InferencePipeline) -> None:
        async with gate:
            for document in _documents(pipeline):
                await cluster.apply(document, manager="benchmark")
            progress.advance(task)

    await asyncio.gather(*(apply(pipeline) for pipeline in pipelines))


def _documents(pipeline: InferencePipeline) -> list[dict[str, Any]]:
    namespace = pipeline.metadata.namespace
    plan = a_plan(pipeline).model_dump(mode="json", by_alias=True, exclude_none=True)
    plan["metadata"] = {"name": pipeline.name, "namespace": namespace}
    documents = [pipeline.model_dump(mode="json", by_alias=True, exclude_none=True), plan]
    for task in profile_tasks(pipeline):
        for stage, variants in task.variants_by_stage.items():
            points = [a_point_profile(variant) for variant in variants]
            profile = a_profile(stage, points, pipeline.name).model_dump(mode="json", by_alias=True, exclude_none=True)
            profile["metadata"] = {
                "name": profile_name(pipeline.name, stage),
                "namespace": namespace,
                "annotations": {FINGERPRINT_ANNOTATION: task.fingerprint},
            }
            documents.append(profile)
    return documents


async def _first_pass(cluster: Cluster, server: "Server", operator: "Operator", count: int, progress: Progress) -> Pass:
    """Wait until every pipeline has its cores in its status."""
    task = progress.add_task("pipelines reconciled", total=count)
    ready: set[tuple[str, ...]] = set()

    async def wait() -> None:
        async for change in list_and_watch(cluster, "InferencePipeline"):
            status = (change.object or {}).get("status") or {}
            if change.object is not None and status.get("cores") == str(STAGES):
                ready.add(change.key)
                progress.update(task, completed=len(ready))
            if len(ready) == count:
                return

    cost = await _cost(server, operator, wait())
    deployments = len((await cluster.list("Deployment")).items)
    is_complete = deployments == OBJECTS_PER_PIPELINE * count
    return replace(cost, reads=cost.reads - OWN_READS, reconciled=len(ready) if is_complete else 0)


async def _next_pass(server: "Server", operator: "Operator", count: int, progress: Progress) -> Pass:
    """Wait until the operator has reconciled every pipeline again."""
    task = progress.add_task("reconciled again", total=count)

    async def wait() -> None:
        before = await operator.reconciles()
        while (reconciled := await operator.reconciles() - before) < count:
            await asyncio.sleep(0.2)
            progress.update(task, completed=reconciled)

    return await _cost(server, operator, wait())


async def _cost(server: "Server", operator: "Operator", wait: Coroutine[Any, Any, None]) -> Pass:
    """Return what the operator does until `wait` ends and it rests."""
    before, reconciled, (cpu_seconds, _) = await server.requests(), await operator.reconciles(), operator.usage()
    started = time.monotonic()
    await asyncio.wait_for(wait, MAX_SECONDS)
    seconds = time.monotonic() - started
    await operator.rest()
    cpu_now, peak_mib = operator.usage()
    requests = await server.requests() - before
    reads, writes = (float(sum(requests[verb] for verb in verbs)) for verbs in (READS, WRITES))
    reconciled = await operator.reconciles() - reconciled
    return Pass(seconds, cpu_now - cpu_seconds, peak_mib, reads, writes, int(reconciled))


async def _change_plans(cluster: Cluster, pipelines: list[InferencePipeline], progress: Progress) -> list[float]:
    """Plan one replica more for a stage of each pipeline; return the seconds until its Deployment has it."""
    seconds = []
    for pipeline in progress.track(pipelines, description="plans changed"):
        namespace, name = pipeline.metadata.namespace, replica_group_name(pipeline.name, "stage-0", "small")
        plan = _documents(pipeline)[1]
        plan["spec"]["stages"][0]["replicas"] = 2
        watch = cluster.watch(
            "Deployment", namespace, None, (await cluster.list("Deployment", namespace)).resource_version
        )
        began = time.monotonic()
        await cluster.apply(plan, manager="benchmark")
        async with asyncio.timeout(60):
            async for _, found in watch:
                if found["metadata"].get("name") == name and found["spec"]["replicas"] == 2:
                    break
        seconds.append(time.monotonic() - began)
    return seconds


def _address(kubeconfig: Path) -> str:
    return str(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


def _samples(text: str) -> Iterator[Sample]:
    return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


@dataclass(frozen=True, slots=True)
class Server:
    """The API server's own count of requests."""

    session: aiohttp.ClientSession
    address: str

    async def requests(self) -> Counter[str]:
        """Return the requests for the kinds that the operator works with, by verb."""
        headers = {"Authorization": f"Bearer {control_plane.TOKEN}"}
        async with self.session.get(f"{self.address}/metrics", headers=headers, ssl=False) as response:
            text = await response.text()
        requests = Counter[str]()
        for sample in _samples("\n".join(line for line in text.splitlines() if line.startswith(SERVER_REQUESTS))):
            if sample.labels.get("resource") in RESOURCES:
                requests[sample.labels["verb"]] += int(sample.value)
        return requests


@dataclass(frozen=True, slots=True)
class Operator:
    """A running operator."""

    session: aiohttp.ClientSession
    process: psutil.Process
    metrics_port: int

    async def reconciles(self) -> float:
        """Return how often it has reconciled; 0 while it starts."""
        with suppress(aiohttp.ClientConnectionError):
            async with self.session.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
                return sum(sample.value for sample in _samples(await response.text()) if sample.name == RECONCILES)
        return 0.0

    async def rest(self) -> None:
        """Wait until two seconds pass without a reconciliation."""
        last = -1.0
        while (now := await self.reconciles()) != last:
            last = now
            await asyncio.sleep(2.0)  # the operator does not report that its queue is empty

    def usage(self) -> tuple[float, float]:
        """Return CPU seconds and peak memory in MiB."""
        total = usage((self.process.pid,))
        return total.cpu_seconds, total.peak_bytes / 2**20


@asynccontextmanager
async def _operator(session: aiohttp.ClientSession, kubeconfig: Path) -> AsyncIterator[Operator]:
    health_port, metrics_port = free_port(), free_port()
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "TRIMTAB_HEALTH_PORT": str(health_port),
        "TRIMTAB_METRICS_PORT": str(metrics_port),
    }
    command = (sys.executable, "-m", "trimtab_operator")
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield Operator(session, psutil.Process(process.pid), metrics_port)
    finally:
        process.terminate()
        await process.wait()
