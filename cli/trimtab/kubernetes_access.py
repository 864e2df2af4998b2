"""What the command line asks of a cluster: to measure a pipeline's variants anew, and how its pipelines are."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trimtab_pipelines.documents import parse
from trimtab_pipelines.kubernetes_names import PROFILE_ANNOTATION, profile_job_name
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import missing_profile_tasks, profile_tasks
from trimtab_pipelines.resource import API_VERSION
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import condition_of

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

MANAGER = "trimtab-cli"
PIPELINE, PROFILE, PLAN = "InferencePipeline", "ModelProfile", "PipelinePlan"
Tell = Callable[[str], None]


@asynccontextmanager
async def connected() -> AsyncIterator["Cluster"]:
    """Talk to the cluster KUBECONFIG names; StartError where that fails at any time."""
    try:
        from trimtab_kubernetes import Cluster, ClusterError  # noqa: PLC0415 - an extra
    except ImportError:
        raise StartError(
            "clusters need the Kubernetes client: pip install '.[kubernetes]' in a clone, else 'trimtab[kubernetes]'"
        ) from None
    try:
        async with await Cluster.connect() as cluster:
            yield cluster
    except ClusterError as error:
        raise StartError(str(error)) from error


async def request_profiling(
    cluster: "Cluster", namespace: str, name: str, tell: Tell, timeout_seconds: float
) -> list[ModelProfile]:
    """Ask the operator for new profiles and return them once they are there; `tell` is told how it goes.

    Raises StartError where there is no such pipeline, the measuring failed, or nothing came in time.
    """
    from trimtab_kubernetes.times import rfc3339  # noqa: PLC0415 - an extra

    if await cluster.get(PIPELINE, namespace, name) is None:
        raise StartError(f"no {PIPELINE} {namespace}/{name} in this cluster; kubectl apply it first")
    annotated = {"name": name, "namespace": namespace, "annotations": {PROFILE_ANNOTATION: rfc3339(time.time())}}
    body = {"apiVersion": API_VERSION, "kind": PIPELINE, "metadata": annotated}
    asked = await cluster.apply(body, manager=MANAGER)
    pipeline = parse(InferencePipeline, asked, f"{PIPELINE} {namespace}/{name}")
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _first(_profiled(cluster, pipeline), _failed(cluster, pipeline, tell))
    except TimeoutError:
        raise StartError(f"no new profiles after {timeout_seconds:.0f} s; see kubectl describe ipl {name}") from None


async def _profiled(cluster: "Cluster", pipeline: InferencePipeline) -> list[ModelProfile]:
    """Wait until nothing of the pipeline is left to measure."""
    from trimtab_kubernetes import list_and_watch  # noqa: PLC0415 - an extra

    known: dict[str, ModelProfile] = {}
    async for change in list_and_watch(cluster, PROFILE, pipeline.metadata.namespace):
        if change.object is not None:
            known[change.key[1]] = parse(ModelProfile, change.object, f"{PROFILE} {change.key[1]}")
            if change.deleted:
                del known[change.key[1]]
        mine = [profile for profile in known.values() if profile.spec.pipeline == pipeline.name]
        if not missing_profile_tasks(pipeline, mine):
            return mine
    raise AssertionError("unreachable: following does not end")


async def _failed(cluster: "Cluster", pipeline: InferencePipeline, tell: Tell) -> list[ModelProfile]:
    """Tell what the condition says, and raise where it says that a Job of what was asked for failed."""
    from trimtab_kubernetes import list_and_watch  # noqa: PLC0415 - an extra

    jobs = [profile_job_name(pipeline.name, task.name, task.run) for task in profile_tasks(pipeline)]
    async for change in list_and_watch(cluster, PIPELINE, pipeline.metadata.namespace):
        if change.key[1] != pipeline.name or change.object is None:
            continue
        if change.deleted:
            raise StartError(f"{PIPELINE} {pipeline.name} was deleted")
        condition = condition_of(change.object, "ProfilesReady")
        message = condition.get("message", "")
        if condition.get("reason") == "ProfileFailed" and any(job in message for job in jobs):
            raise StartError(message)
        if condition:
            tell(f"{condition['reason']}: {message}")
    raise AssertionError("unreachable: following does not end")


async def _first(*waiting: Awaitable[list[ModelProfile]]) -> list[ModelProfile]:
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_pipelines(cluster: "Cluster", namespace: str | None) -> list[dict[str, Any]]:
    """The pipelines of a namespace, or of all."""
    return (await cluster.list(PIPELINE, namespace)).items
