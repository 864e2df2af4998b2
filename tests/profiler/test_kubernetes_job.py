"""Profile task run against a real API server with real replicas."""

import dataclasses
from pathlib import Path

import pytest

from tests.builders import a_body, a_point_profile, a_profile, a_variant, an_echo_pipeline
from tests.router.fakes import FakeReplica
from trimtab_kubernetes import Cluster
from trimtab_pipelines.documents import dump_yaml, parse
from trimtab_pipelines.kubernetes_names import PROFILER_MANAGER
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import missing_profile_tasks, profile_tasks
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.__main__ import main
from trimtab_profiler.kubernetes_job import TaskError, find_task, run_task
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions

BRIEF = Effort(seconds=0.05, min_batches=2, max_seconds=0.2, rounds=1)


def of_namespace(pipeline: InferencePipeline, namespace: str) -> InferencePipeline:
    return pipeline.replace(metadata=Metadata(name=pipeline.name, namespace=namespace))


async def test_each_kind_of_node_has_its_own_profiles(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    first = [a_variant("plain", maxBatchSize=2), a_variant("fast", maxBatchSize=2, nodeSelector={"disk": "ssd"})]
    pipeline = of_namespace(an_echo_pipeline(first, [a_variant("last", maxBatchSize=1)]), namespace)
    owner = await cluster.apply(a_body(pipeline), manager="user")
    tasks = profile_tasks(pipeline)
    assert [task.variants for task in tasks] == [(("first", "plain"), ("second", "last")), (("first", "fast"),)]

    for task in tasks:
        options = ProfileOptions.quick(pipeline, task.variants_by_stage)
        await run_task(cluster, pipeline, tmp_path, task.name, dataclasses.replace(options, effort=BRIEF))

    listed = (await cluster.list("ModelProfile", namespace)).items
    found = [parse(ModelProfile, item, "it") for item in listed]
    assert sorted((one.spec.stage, *(point.variant for point in one.spec.points)) for one in found) == [
        ("first", "fast"),
        ("first", "plain"),
        ("second", "last"),
    ]
    assert missing_profile_tasks(pipeline, found) == ()
    assert {one.spec.longest_batch_seconds for one in found} == {None}
    assert {item["metadata"]["ownerReferences"][0]["uid"] for item in listed} == {owner["metadata"]["uid"]}
    assert {item["metadata"]["managedFields"][0]["manager"] for item in listed} == {PROFILER_MANAGER}


async def test_deleted_pipeline_is_not_measured(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    pipeline = of_namespace(an_echo_pipeline([a_variant("plain")]), namespace)
    with pytest.raises(TaskError, match=f"InferencePipeline {namespace}/echoes does not exist"):
        await run_task(cluster, pipeline, tmp_path, profile_tasks(pipeline)[0].name)


async def test_a_user_container_is_measured_in_the_pod(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    server = await FakeReplica().start()
    container = {"image": "triton:1", "port": server.port, "modelName": "small"}
    theirs = {"name": "theirs", "accuracy": 0.9, "maxBatchSize": 1, "container": container}
    pipeline = of_namespace(an_echo_pipeline([a_variant("plain"), theirs]), namespace)
    await cluster.apply(a_body(pipeline), manager="user")
    _, task = profile_tasks(pipeline)
    options = dataclasses.replace(ProfileOptions.quick(pipeline, task.variants_by_stage), effort=BRIEF)
    try:
        profiles = await run_task(cluster, pipeline, tmp_path, task.name, options)
    finally:
        await server.kill()

    assert task.variants == (("first", "theirs"),)
    assert [point.variant for point in profiles["first"].spec.points] == ["theirs"]


def test_a_container_with_an_applied_profile_is_not_measured() -> None:
    theirs = {"name": "theirs", "accuracy": 0.9, "container": {"image": "triton:1"}}
    pipeline = an_echo_pipeline([a_variant("plain"), theirs])
    plain, own = profile_tasks(pipeline)
    applied = a_profile("first", [a_point_profile("theirs")], pipeline.name)

    assert missing_profile_tasks(pipeline, []) == (plain, own)
    assert missing_profile_tasks(pipeline, [applied]) == (plain,)
    with pytest.raises(TaskError, match=f"no profile task 'gpu'; its tasks: {plain.name}"):
        find_task(pipeline, "gpu")


def test_command_reports_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(an_echo_pipeline([a_variant("plain")])))
    arguments = ["--cluster", "--namespace", "here", "--task", "cpu", "--pipeline"]

    assert main([*arguments, str(tmp_path)]) == 1
    assert "no Kubernetes credentials" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "absent.yaml")]) == 1
    assert "absent.yaml: No such file" in capsys.readouterr().err
