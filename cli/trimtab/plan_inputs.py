"""What a plan is made from: a pipeline, its profiles, what runs now; from files, or as a cluster has them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.kubernetes_access import PIPELINE, PLAN, PROFILE, connected
from trimtab.options import console
from trimtab.preflight import choose_profiles
from trimtab_pipelines.documents import load_pipeline, load_profiles, parse_plan
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan is made from; `plan` is what runs now, where that is known."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    plan: PipelinePlan | None = None


def plan_inputs(pipeline: Path, profiles: Path | None, *, in_cluster: bool, namespace: str | None) -> PlanInputs:
    """Read them: in the cluster those of the pipeline of that name, or of the name in that file.

    Profiles given as a file count before the cluster's. Raises StartError where the cluster has no such pipeline, and
    DocumentError where something cannot be read.
    """
    if in_cluster:
        found = asyncio.run(_deployed(*namespaced_name(pipeline, namespace)))
        return found if profiles is None else replace(found, profiles=load_profiles(profiles))
    document = load_pipeline(pipeline)
    return PlanInputs(document, load_profiles(choose_profiles(pipeline, document, profiles, console)))


def namespaced_name(pipeline: Path, namespace: str | None) -> tuple[str, str]:
    """Namespace and name of the pipeline that is meant: that of a file, else the one called so."""
    if pipeline.exists():
        metadata = load_pipeline(pipeline).metadata
        return namespace or metadata.namespace, metadata.name
    return namespace or "default", str(pipeline)


async def _deployed(namespace: str, name: str) -> PlanInputs:
    async with connected() as cluster:
        pipeline = await cluster.get(PIPELINE, namespace, name)
        profiles = (await cluster.list(PROFILE, namespace)).items
        plan = await cluster.get(PLAN, namespace, name)
    # Here the Kubernetes client is known to be installed.
    from trimtab_adapter.cluster.cluster_cache import ClusterCache  # noqa: PLC0415 - an extra
    from trimtab_adapter.cluster.config_source import ClusterConfigSource  # noqa: PLC0415 - an extra

    if pipeline is None:
        raise StartError(f"no {PIPELINE} {namespace}/{name} in this cluster; see kubectl get ipl -A")
    known = ClusterCache()
    for found in (pipeline, *profiles):
        known.put(found)
    documents = ClusterConfigSource(known, (namespace, name))
    if documents.remark:
        console.print(documents.remark)
    parsed = None if plan is None else parse_plan(plan, f"{PLAN} {namespace}/{name}")
    return PlanInputs(documents.pipeline, documents.profiles, parsed)
