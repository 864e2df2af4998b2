"""ConfigMaps of the tasks registered at run time: created empty, mounted, and never overwritten."""

import base64
import json
from typing import Any

import pytest

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.operator_.conftest import Site
from trimtab_kubernetes import Cluster
from trimtab_pipelines.kubernetes_names import router_name, tasks_name

CONTENT = {"2-new.safetensors": base64.b64encode(b"\xff\xfe").decode()}


def tasked_document(**stage: Any) -> dict[str, Any]:
    """A pipeline whose stage reads the task of each row."""
    inputs: list[dict[str, Any]] = [
        {"name": "x", "datatype": "FP32", "shape": [4]},
        {"name": "task", "datatype": "INT64", "shape": []},
    ]
    reads = [{"name": tensor["name"], "from": f"request.inputs.{tensor['name']}"} for tensor in inputs]
    return a_pipeline_document([a_stage("first", inputs=reads, **stage)], inputs=inputs)


@pytest.fixture
def site(cluster: Cluster, namespace: str) -> Site:
    container: dict[str, Any] = {"name": "own", "accuracy": 0.9, "container": {"image": "triton:1", "port": 8000}}
    variants = [a_variant("small"), container | {"resources": {"cpu": "1", "memory": "1Gi"}}]
    return Site(cluster, namespace, tasked_document(variants=variants))


async def test_replicas_mount_their_variants_tasks(site: Site) -> None:
    await site.serve()
    (deployment,) = [
        found["spec"]["template"]["spec"]
        for found in (await site.cluster.list("Deployment", site.namespace)).items
        if found["metadata"]["labels"]["app.kubernetes.io/component"] == "model-server"
    ]
    (container,) = deployment["containers"]
    volumes = {volume["name"]: volume.get("configMap") for volume in deployment["volumes"]}
    folders = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    (model,) = json.loads(next(each["value"] for each in container["env"] if each["name"] == "TRIMTAB_MODELS"))
    found = folders[model["tasksFolder"]]

    assert (found["name"], found["optional"]) == (tasks_name(site.name, "first", "small"), True)
    assert await site.names("ConfigMap") >= {found["name"]}
    assert tasks_name(site.name, "first", "own") not in await site.names("ConfigMap"), "its container takes no tasks"


async def test_operator_keeps_the_tasks_that_routers_write(site: Site) -> None:
    await site.serve()
    name = tasks_name(site.name, "first", "small")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": site.namespace}}
    await site.cluster.apply(body | {"binaryData": CONTENT}, manager="router")
    before = await site.versions()

    await site.settle()
    assert await site.versions() == before
    site.restart()
    await site.settle()
    found = await site.get("ConfigMap", name)
    assert found["binaryData"] == CONTENT


async def test_without_task_input_nothing_is_granted(site: Site) -> None:
    await site.serve()
    role = f"{router_name(site.name)}-tasks"
    assert await site.names("Role") == {role}
    spec = site.document["spec"]
    del spec["inputs"][1], spec["stages"][0]["inputs"][1]

    await site.apply_profiled()
    await site.apply_plan(2)
    await site.settle()

    assert await site.names("Role") == set()
    assert role not in await site.names("RoleBinding")
    assert not [name for name in await site.names("ConfigMap") if "-tasks-" in name]
