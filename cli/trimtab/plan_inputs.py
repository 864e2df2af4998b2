"""Inputs of a plan: a pipeline, its profiles and its current plan, from files or from a cluster."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.kubernetes_access import PLAN, PROFILE, connected, get_pipeline
from trimtab.options import PlanArguments, console
from trimtab.preflight import choose_profiles
from trimtab_pipelines.documents import load_pipeline, load_profiles, parse_plan
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of a plan."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    """By stage."""
    plan: PipelinePlan | None = None
    """The current plan, if known."""


def plan_inputs(pipeline: Path, arguments: PlanArguments) -> PlanInputs:
    """Read the inputs; a profile file takes precedence over the cluster's profiles.

    Raises:
        StartError: the cluster has no such pipeline.
        DocumentError: a document cannot be read.
    """
    profiles = arguments.profiles
    if arguments.in_cluster:
        inputs = asyncio.run(_from_cluster(*namespaced_name(pipeline, arguments.namespace)))
        return inputs if profiles is None else replace(inputs, profiles=load_profiles(profiles))
    document = load_pipeline(pipeline)
    return PlanInputs(document, load_profiles(choose_profiles(pipeline, document, profiles, console)))


def namespaced_name(pipeline: Path, namespace: str | None) -> tuple[str, str]:
    """Namespace and name of the pipeline in a file or, if there is no such file, of the pipeline with that name."""
    if pipeline.exists():
        metadata = load_pipeline(pipeline).metadata
        return namespace or metadata.namespace, metadata.name
    return namespace or "default", str(pipeline)


async def _from_cluster(namespace: str, name: str) -> PlanInputs:
    async with connected() as cluster:
        pipeline = await get_pipeline(cluster, namespace, name)
        profiles = (await cluster.list(PROFILE, namespace)).items
        plan = await cluster.get(PLAN, namespace, name)
    # Imported here: these modules need the Kubernetes client, an optional dependency.
    from trimtab_adapter.cluster.cluster_cache import ClusterCache  # noqa: PLC0415
    from trimtab_adapter.cluster.config_source import ClusterConfigSource  # noqa: PLC0415

    cache = ClusterCache()
    for document in (pipeline, *profiles):
        cache.put(document)
    source = ClusterConfigSource(cache, (namespace, name))
    if source.remark:
        console.print(source.remark)
    parsed = None if plan is None else parse_plan(plan, f"{PLAN} {namespace}/{name}")
    return PlanInputs(source.pipeline, source.profiles, parsed)
