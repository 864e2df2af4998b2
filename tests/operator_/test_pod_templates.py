"""Fields that a user adds to the pods of replicas."""

from typing import Any

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.operator_.conftest import SETTINGS, owned
from trimtab_operator.manifests.profile_jobs import profile_job
from trimtab_operator.manifests.replica_groups import replica_group
from trimtab_pipelines.profiling import profile_tasks
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.spec import InferencePipeline

WEIGHTS = {"name": "weights-claim", "persistentVolumeClaim": {"claimName": "llava"}}
MOUNT = {"name": "weights-claim", "mountPath": "/models"}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"sidecar.istio.io/inject": "false"}},
    "spec": {
        "priorityClassName": "serving",
        "securityContext": {"runAsNonRoot": False},
        "volumes": [WEIGHTS],
        "initContainers": [{"name": "download", "image": "fetch:1"}],
        "containers": [
            {"name": "model-server", "volumeMounts": [MOUNT], "env": [{"name": "LOG", "value": "2"}]},
            {"name": "exporter", "image": "exporter:1"},
        ],
    },
}
ENGINE = {
    "name": "own",
    "accuracy": 0.9,
    "container": {"image": "triton:1", "env": {"LOG": "1", "PATH": "/"}},
    "resources": {"cpu": "1", "memory": "2Gi"},
}


def a_templated_pipeline(variant: dict[str, Any], template: dict[str, Any] = TEMPLATE) -> InferencePipeline:
    return owned(a_pipeline([a_stage(variants=[variant | {"podTemplate": template}])]))


def replica_pod(pipeline: InferencePipeline) -> dict[str, Any]:
    (stage,) = pipeline.spec.stages
    (group,) = replica_groups(stage)
    template: dict[str, Any] = replica_group(pipeline, stage, group, SETTINGS, replicas=1, surge=True)["spec"][
        "template"
    ]
    return template


def profiler_pod(pipeline: InferencePipeline) -> dict[str, Any]:
    (task,) = profile_tasks(pipeline)
    template: dict[str, Any] = profile_job(pipeline, task, SETTINGS)["spec"]["template"]
    return template


def test_a_replica_has_what_its_user_adds() -> None:
    pod = replica_pod(a_templated_pipeline(ENGINE))
    spec, (server, exporter) = pod["spec"], pod["spec"]["containers"]

    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["labels"]["trimtab.dev/pipeline"] == "sample"
    assert pod["metadata"]["annotations"] == TEMPLATE["metadata"]["annotations"]
    assert spec["priorityClassName"] == "serving"
    assert spec["securityContext"] == {"runAsNonRoot": False, "seccompProfile": {"type": "RuntimeDefault"}}
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp", "weights-claim"]
    assert [container["name"] for container in spec["initContainers"]] == ["download"]
    assert server["image"] == "triton:1"
    assert server["env"] == [{"name": "LOG", "value": "2"}, {"name": "PATH", "value": "/"}]
    assert [mount["mountPath"] for mount in server["volumeMounts"]] == ["/tmp", "/models"]  # noqa: S108
    assert exporter["name"] == "exporter"


def test_a_profile_job_has_the_volumes_of_the_replica_and_ends() -> None:
    pod = profiler_pod(a_templated_pipeline(ENGINE))
    init, containers = pod["spec"]["initContainers"], pod["spec"]["containers"]

    assert [container["name"] for container in init] == ["download", "model-server"]
    assert init[1]["volumeMounts"][-1] == MOUNT
    assert [container["name"] for container in containers] == ["profiler"]
    assert MOUNT not in containers[0]["volumeMounts"]
    assert WEIGHTS in pod["spec"]["volumes"]


def test_the_profiler_of_a_family_has_its_replicas_additions() -> None:
    (profiler,) = profiler_pod(a_templated_pipeline(a_variant()))["spec"]["containers"]

    assert profiler["name"] == "profiler"
    assert MOUNT in profiler["volumeMounts"]


def test_variants_with_other_pods_are_not_hosted_together() -> None:
    variants = [a_variant("plain"), a_variant("tagged", podTemplate={"metadata": {"labels": {"team": "a"}}})]
    pipeline = a_pipeline([a_stage(variants=variants)])

    assert [group.names for group in replica_groups(pipeline.spec.stages[0])] == [{"plain"}, {"tagged"}]
    assert len(profile_tasks(pipeline)) == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"metadata": {"labels": {"trimtab.dev/stage": "x"}}}, "trimtab.dev/stage is Trimtab's"),
        ({"spec": {"serviceAccountName": "admin"}}, "set spec.serviceAccountName of the pipeline"),
        ({"spec": {"containers": [{"image": "x"}]}}, "containers: give a list of entries with names"),
        ({"spec": {"volumes": 5}}, "volumes: give a list of entries with names"),
        ({"spec": {"hostAliases": ["x" * 2**16]}}, "give at most 65536"),
        ({"specs": {}}, "specs"),
    ],
)
def test_a_template_that_breaks_replicas_is_refused(template: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_templated_pipeline(ENGINE, template)
