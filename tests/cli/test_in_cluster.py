"""The command line against a real API server; what an operator would do is done by the test."""

import asyncio
from typing import Any

import pytest

from tests.profiler.builders import a_pipeline, a_point, a_variant
from trimtab.commands import run
from trimtab.in_cluster import profile_anew
from trimtab.local.processes import StartError
from trimtab_kubernetes import Cluster, follow
from trimtab_pipelines.cluster import PROFILE_ANNOTATION, profile_job_name
from trimtab_pipelines.documents import parse
from trimtab_pipelines.profile import Hardware, ModelProfile, ModelProfileSpec
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, profile_tasks
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline

NAMED = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline"}


def body(namespace: str) -> dict[str, Any]:
    written: dict[str, Any] = a_pipeline([a_variant("plain")]).model_dump(mode="json", by_alias=True, exclude_none=True)
    written["metadata"] = {"name": "echoes", "namespace": namespace}
    return written


async def asked_for(cluster: Cluster, namespace: str) -> InferencePipeline:
    async for change in follow(cluster, "InferencePipeline", namespace):
        found = change.object or {}
        if PROFILE_ANNOTATION in found.get("metadata", {}).get("annotations", {}):
            return parse(InferencePipeline, found, "it")
    raise AssertionError("the watch ended")


async def told_that(cluster: Cluster, namespace: str, reason: str, message: str) -> None:
    condition = {"type": "ProfilesReady", "status": "False", "reason": reason, "message": message}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    named = {**NAMED, "metadata": {"name": "echoes", "namespace": namespace}}
    await cluster.apply(
        named | {"status": {"conditions": [condition]}}, manager="trimtab-operator", subresource="status"
    )


async def test_new_profiles_are_asked_for_and_waited_for(cluster: Cluster, namespace: str) -> None:
    await cluster.apply(body(namespace), manager="user")
    heard: asyncio.Queue[str] = asyncio.Queue()
    asking = asyncio.create_task(profile_anew(cluster, namespace, "echoes", heard.put_nowait, 30))
    pipeline = await asked_for(cluster, namespace)
    await told_that(cluster, namespace, "Profiling", "Job x")
    assert await heard.get() == "Profiling: Job x"
    (task,) = profile_tasks(pipeline)
    spec = ModelProfileSpec(
        pipeline="echoes",
        stage="first",
        hardware=Hardware(processor="p", node_cores=1),
        points=(a_point("plain", 1.0, {1: 0.01}),),
    )
    metadata = Metadata(name="x", namespace=namespace, annotations={FINGERPRINT_ANNOTATION: task.fingerprint})
    profile = ModelProfile(metadata=metadata, spec=spec)
    await cluster.apply(profile.model_dump(mode="json", by_alias=True, exclude_none=True), manager="trimtab-profiler")

    assert [one.metadata.name for one in await asking] == ["x"]


async def test_a_failure_is_told(cluster: Cluster, namespace: str) -> None:
    await cluster.apply(body(namespace), manager="user")
    asking = asyncio.create_task(profile_anew(cluster, namespace, "echoes", print, 30))
    (task,) = profile_tasks(await asked_for(cluster, namespace))
    await told_that(cluster, namespace, "ProfileFailed", "Job of the time before failed")
    job = profile_job_name("echoes", task.name, task.fingerprint)
    await told_that(cluster, namespace, "ProfileFailed", f"Job {job} failed: BackoffLimitExceeded")
    with pytest.raises(StartError, match=f"Job {job} failed"):
        await asking
    with pytest.raises(StartError, match=r"no InferencePipeline .*/absent in this cluster"):
        await profile_anew(cluster, namespace, "absent", print, 30)


async def test_status_lists_the_pipelines(cluster, namespace, kubeconfig, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    await cluster.apply(body(namespace), manager="user")
    code = await asyncio.to_thread(run, ["status", "--cluster", "--namespace", namespace])

    assert code == 0
    assert "echoes" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["status", "--cluster", "--namespace", "elsewhere"]) == 0
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert await asyncio.to_thread(run, ["status", "--cluster"]) == 1
    assert "no Kubernetes to talk to" in capsys.readouterr().err
