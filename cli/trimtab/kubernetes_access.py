"""Access to a cluster: reads its pipelines and requests new profiles."""

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
OnStatus = Callable[[str], None]
"""Called with the status of the profiling."""


@asynccontextmanager
async def connected() -> AsyncIterator["Cluster"]:
    """Connect to the cluster that KUBECONFIG names; raises StartError for every error of the cluster in the block."""
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


async def get_pipeline(cluster: "Cluster", namespace: str, name: str) -> dict[str, Any]:
    """Return a pipeline's document; raises StartError if there is none."""
    pipeline = await cluster.get(PIPELINE, namespace, name)
    if pipeline is None:
        raise StartError(f"no {PIPELINE} {namespace}/{name} in this cluster; see kubectl get ipl -A")
    return pipeline


async def request_profiling(
    cluster: "Cluster", namespace: str, name: str, on_status: OnStatus, timeout_seconds: float
) -> list[ModelProfile]:
    """Ask the operator for new profiles, wait for them and return them.

    Raises:
        StartError: there is no such pipeline, profiling failed, or it timed out.
    """
    from trimtab_kubernetes.objects import rfc3339  # noqa: PLC0415 - an extra

    await get_pipeline(cluster, namespace, name)
    metadata = {"name": name, "namespace": namespace, "annotations": {PROFILE_ANNOTATION: rfc3339(time.time())}}
    body = {"apiVersion": API_VERSION, "kind": PIPELINE, "metadata": metadata}
    applied = await cluster.apply(body, manager=MANAGER)
    pipeline = parse(InferencePipeline, applied, f"{PIPELINE} {namespace}/{name}")
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _first(_wait_for_profiles(cluster, pipeline), _watch_for_failure(cluster, pipeline, on_status))
    except TimeoutError:
        raise StartError(f"no new profiles after {timeout_seconds:.0f} s; see kubectl describe ipl {name}") from None


async def _wait_for_profiles(cluster: "Cluster", pipeline: InferencePipeline) -> list[ModelProfile]:
    """Wait until every profile of the pipeline exists; return them."""
    from trimtab_kubernetes import list_and_watch  # noqa: PLC0415 - an extra

    profiles: dict[str, ModelProfile] = {}
    async for change in list_and_watch(cluster, PROFILE, pipeline.metadata.namespace):
        if change.object is not None:
            profiles[change.key[1]] = parse(ModelProfile, change.object, f"{PROFILE} {change.key[1]}")
            if change.deleted:
                del profiles[change.key[1]]
        own = [profile for profile in profiles.values() if profile.spec.pipeline == pipeline.name]
        if not missing_profile_tasks(pipeline, own):
            return own
    raise AssertionError("unreachable: a watch does not end")


async def _watch_for_failure(
    cluster: "Cluster", pipeline: InferencePipeline, on_status: OnStatus
) -> list[ModelProfile]:
    """Report the condition ProfilesReady; raise StartError once it names a failed Job of this pipeline."""
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
            on_status(f"{condition['reason']}: {message}")
    raise AssertionError("unreachable: a watch does not end")


async def _first(*awaitables: Awaitable[list[ModelProfile]]) -> list[ModelProfile]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_pipelines(cluster: "Cluster", namespace: str | None) -> list[dict[str, Any]]:
    """Return the pipelines of a namespace, or of all namespaces."""
    return (await cluster.list(PIPELINE, namespace)).items
