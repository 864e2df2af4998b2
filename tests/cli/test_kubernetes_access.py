"""Commands against a real API server; the test acts as the operator."""

import asyncio
from typing import Any

import pytest

from tests.builders import a_body, a_measured_profile, a_plan, a_profile, a_variant, an_echo_pipeline
from trimtab.app import run
from trimtab.kubernetes_access import request_profiling
from trimtab_kubernetes import Cluster, list_and_watch
from trimtab_pipelines.documents import dump_yaml, parse
from trimtab_pipelines.kubernetes_names import PROFILE_ANNOTATION, profile_job_name
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, profile_tasks
from trimtab_pipelines.spec import InferencePipeline

NAMED = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline"}


def body(namespace: str) -> dict[str, Any]:
    return a_body(an_echo_pipeline([a_variant("plain")]), namespace=namespace)


async def wait_for_request(cluster: Cluster, namespace: str) -> InferencePipeline:
    async for change in list_and_watch(cluster, "InferencePipeline", namespace):
        found = change.object or {}
        if PROFILE_ANNOTATION in found.get("metadata", {}).get("annotations", {}):
            return parse(InferencePipeline, found, "it")
    raise AssertionError("the watch ended")


async def set_condition(cluster: Cluster, namespace: str, reason: str, message: str) -> None:
    condition = {"type": "ProfilesReady", "status": "False", "reason": reason, "message": message}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    named = {**NAMED, "metadata": {"name": "echoes", "namespace": namespace}}
    await cluster.apply(
        named | {"status": {"conditions": [condition]}}, manager="trimtab-operator", subresource="status"
    )


async def test_profile_in_cluster_waits_for_new_profiles(cluster: Cluster, namespace: str) -> None:
    await cluster.apply(body(namespace), manager="user")
    statuses: asyncio.Queue[str] = asyncio.Queue()
    asking = asyncio.create_task(request_profiling(cluster, namespace, "echoes", statuses.put_nowait, 30))
    pipeline = await wait_for_request(cluster, namespace)
    await set_condition(cluster, namespace, "Profiling", "Job x")
    assert await statuses.get() == "Profiling: Job x"
    (task,) = profile_tasks(pipeline)
    profile = a_profile("first", [a_measured_profile({1: 0.01}, "plain")], "echoes")
    marks = {FINGERPRINT_ANNOTATION: task.fingerprint}
    await cluster.apply(a_body(profile, "x", namespace, annotations=marks), manager="trimtab-profiler")

    assert [one.metadata.name for one in await asking] == ["x"]


async def test_failed_profile_job_is_reported(cluster: Cluster, namespace: str) -> None:
    await cluster.apply(body(namespace), manager="user")
    asking = asyncio.create_task(request_profiling(cluster, namespace, "echoes", print, 30))
    (task,) = profile_tasks(await wait_for_request(cluster, namespace))
    await set_condition(cluster, namespace, "ProfileFailed", "Job of the time before failed")
    job = profile_job_name("echoes", task.name, task.run)
    await set_condition(cluster, namespace, "ProfileFailed", f"Job {job} failed: BackoffLimitExceeded")
    with pytest.raises(StartError, match=f"Job {job} failed"):
        await asking
    with pytest.raises(StartError, match=r"no InferencePipeline .*/absent in this cluster"):
        await request_profiling(cluster, namespace, "absent", print, 30)


def documents(namespace: str) -> list[dict[str, Any]]:
    """A pipeline of two echoes, its profile, and the plan that runs: the light one, for four requests a second."""
    pipeline = an_echo_pipeline([a_variant("light", accuracy=0.6), a_variant("heavy", accuracy=0.9)])
    points = (a_measured_profile({1: 0.01, 2: 0.02}, "light"), a_measured_profile({1: 0.03, 2: 0.05}, "heavy"))
    plan = a_plan(pipeline, 3, batchSize=1)
    forecast = ForecastRecord(peak_rps=4.0, source="lstm", reason="")
    plan = plan.with_spec(forecast=forecast)
    return [a_body(each, namespace=namespace) for each in (pipeline, a_profile("first", points, "echoes"), plan)]


async def test_explain_in_cluster_uses_the_current_plan(cluster, namespace, kubeconfig, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    for one in documents(namespace):
        await cluster.apply(one, manager="user")

    async def said(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(run, [*arguments, "--in-cluster", "--namespace", namespace])
        heard = capsys.readouterr()
        return code, heard.out + heard.err

    code, explained = await said("explain", "echoes")
    assert code == 0
    assert "echoes at 4 requests/s" in explained
    assert "heavy" in explained
    assert "proven optimal" in explained
    code, planned = await said("plan", "echoes", "--load", "2", "--what-if", "load=x2")
    assert code == 0
    assert "load=x2" in planned
    assert await said("explain", "absent") == (
        1,
        f"trimtab: no InferencePipeline {namespace}/absent in this cluster; see kubectl get ipl -A\n",
    )
    await cluster.delete("PipelinePlan", namespace, "echoes")
    code, refused = await said("explain", "echoes")
    assert code != 0
    assert "give --load" in refused


async def test_explain_in_cluster_uses_the_charts_flavors(
    cluster, namespace, kubeconfig, monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    labels = {"app.kubernetes.io/name": "trimtab", "app.kubernetes.io/component": "adapter"}
    flavors = {"name": "TRIMTAB_FLAVORS", "value": '[{"name": "cheap", "prices": {"core": 0.04}}]'}
    adapter = {"name": "adapter", "image": "none", "env": [flavors]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "adapter", "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [adapter]}},
        },
    }
    pipeline = an_echo_pipeline([a_variant("light", flavor="cheap")])
    profile = a_profile("first", [a_measured_profile({1: 0.01}, "light")], "echoes")
    for one in (deployment, *(a_body(each, namespace=namespace) for each in (pipeline, profile))):
        await cluster.apply(one, manager="user")
    file = tmp_path / "pipeline.yaml"
    file.write_text(dump_yaml(pipeline))
    for argument in ("echoes", str(file)):
        arguments = ["explain", argument, "--load", "4", "--in-cluster", "--namespace", namespace]
        assert await asyncio.to_thread(run, arguments) == 0
        assert "cheap 0.04" in capsys.readouterr().out


async def test_status_lists_pipelines_of_the_cluster(cluster, namespace, kubeconfig, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    await cluster.apply(body(namespace), manager="user")
    code = await asyncio.to_thread(run, ["status", "--cluster", "--namespace", namespace])

    assert code == 0
    assert "echoes" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["status", "--cluster", "--namespace", "elsewhere"]) == 0
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert await asyncio.to_thread(run, ["status", "--cluster"]) == 1
    assert "KUBECONFIG" in capsys.readouterr().err
