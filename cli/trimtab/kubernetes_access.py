"""Access to a cluster: reads its pipelines and requests new profiles."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_pipelines.documents import load_pipeline, parse, parse_flavors
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.kubernetes_names import COMPONENT, FLAVORS_VARIABLE, PROFILE_ANNOTATION, profile_job_name
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import missing_profile_tasks, profile_tasks
from trimtab_pipelines.resource import API_VERSION
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import condition_of

if TYPE_CHECKING:
    from trimtab_kubernetes import Cluster

MANAGER = "trimtab-cli"
POLL_SECONDS = 0.5
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


def namespaced_name(pipeline: Path, namespace: str | None) -> tuple[str, str]:
    """Namespace and name of the pipeline in a file or, if there is no such file, of the pipeline with that name."""
    if pipeline.exists():
        metadata = load_pipeline(pipeline).metadata
        return namespace or metadata.namespace, metadata.name
    return namespace or "default", str(pipeline)


async def get_pipeline(cluster: "Cluster", namespace: str, name: str) -> dict[str, Any]:
    """Return a pipeline's document; raises StartError if there is none."""
    pipeline = await cluster.get(PIPELINE, namespace, name)
    if pipeline is None:
        raise StartError(f"no {PIPELINE} {namespace}/{name} in this cluster; see kubectl get ipl -A")
    return pipeline


async def resource_flavors(cluster: "Cluster") -> tuple[ResourceFlavor, ...]:
    """Resource flavors of the chart, from its adapter's environment; none if that may not be read."""
    from trimtab_kubernetes import Rejected  # noqa: PLC0415 - an extra

    selector = f"{COMPONENT}=adapter,app.kubernetes.io/name=trimtab"
    try:
        adapters = (await cluster.list("Deployment", labels=selector)).items
    except Rejected:
        return ()
    containers = [container for found in adapters for container in found["spec"]["template"]["spec"]["containers"]]
    variables = [variable for container in containers for variable in container.get("env", [])]
    written = (each.get("value", "[]") for each in variables if each["name"] == FLAVORS_VARIABLE)
    return parse_flavors(next(written, "[]"))


async def request_profiling(
    cluster: "Cluster", namespace: str, name: str, on_status: OnStatus, timeout_seconds: float
) -> list[ModelProfile]:
    """Ask the operator for new profiles, wait for them and return them.

    Raises StartError if there is no such pipeline, profiling failed, or it timed out.
    """
    from trimtab_kubernetes.objects import rfc3339  # noqa: PLC0415 - an extra

    await get_pipeline(cluster, namespace, name)
    metadata = {"name": name, "namespace": namespace, "annotations": {PROFILE_ANNOTATION: rfc3339(time.time())}}
    body = {"apiVersion": API_VERSION, "kind": PIPELINE, "metadata": metadata}
    applied = await cluster.apply(body, manager=MANAGER)
    pipeline = parse(InferencePipeline, applied, f"{PIPELINE} {namespace}/{name}")
    jobs = [profile_job_name(pipeline.name, task.name, task.run) for task in profile_tasks(pipeline)]
    try:
        async with asyncio.timeout(timeout_seconds):
            while missing_profile_tasks(pipeline, profiles := await _list_profiles(cluster, pipeline)):
                _report_status(await get_pipeline(cluster, namespace, name), jobs, on_status)
                await asyncio.sleep(POLL_SECONDS)
            return profiles
    except TimeoutError:
        raise StartError(f"no new profiles after {timeout_seconds:.0f} s; see kubectl describe ipl {name}") from None


async def _list_profiles(cluster: "Cluster", pipeline: InferencePipeline) -> list[ModelProfile]:
    documents = (await cluster.list(PROFILE, pipeline.metadata.namespace)).items
    profiles = [parse(ModelProfile, document, f"{PROFILE} {document['metadata']['name']}") for document in documents]
    return [profile for profile in profiles if profile.spec.pipeline == pipeline.name]


def _report_status(pipeline: dict[str, Any], jobs: Sequence[str], on_status: OnStatus) -> None:
    """Report the condition ProfilesReady; raise StartError if it names a failed Job of `jobs`."""
    condition = condition_of(pipeline, "ProfilesReady")
    message = condition.get("message", "")
    if condition.get("reason") == "ProfileFailed" and any(job in message for job in jobs):
        raise StartError(message)
    if condition:
        on_status(f"{condition['reason']}: {message}")
