"""Manifests compared with golden files; TRIMTAB_UPDATE_GOLDEN=1 rewrites the files."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import a_pipeline, a_pipeline_document, a_plan, a_point_profile, a_profile, a_stage, a_variant
from tests.control_plane import define
from tests.operator_.conftest import SETTINGS, Site, owned
from tests.operator_.test_registered_tasks import tasked_document
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.engines import an_engine_pipeline
from trimtab_kubernetes import Cluster
from trimtab_operator.manifests.network_policies import network_policies
from trimtab_operator.manifests.objects import ROUTER, pipeline_labels
from trimtab_operator.manifests.profile_jobs import profile_job, profiler_account
from trimtab_operator.manifests.replica_groups import replica_group, replica_group_budget, replica_monitors, service
from trimtab_operator.manifests.routers import router_objects, router_pipeline, task_objects
from trimtab_operator.reconcile import reconcile
from trimtab_operator.reconciliation.object_diff import contains
from trimtab_operator.reconciliation.observed_state import ObservedState
from trimtab_operator.settings import Settings
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls, ReplicaIdentity
from trimtab_pipelines.model_spec import join_variable
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, missing_profile_tasks, profile_tasks
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.spec import InferencePipeline

GOLDEN = Path(__file__).parents[1] / "data" / "operating"
GPU = {
    "nodeSelector": {"gpu": "l4"},
    "runtimeClassName": "nvidia",
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
VARIANTS = [
    a_variant("small", secretName="bucket", resources={"cpu": "500m", "memory": "256Mi"}),
    a_variant("medium", secretName="bucket", resources={"cpu": "500m", "memory": "1Gi"}),
    a_variant("large", resources={"cpu": "2", "memory": "4Gi", "gpu": 1}, **GPU),
    {
        "name": "own",
        "accuracy": 0.9,
        "container": {"image": "triton:1", "args": ["--models=/m"], "env": {"LOG": "1"}, "port": 8000},
        "resources": {"cpu": "1", "memory": "2Gi"},
    },
]


PIPELINE = owned(a_pipeline([a_stage(variants=VARIANTS)], budget={"cores": "8", "gpus": 1}))
SELDON = PIPELINE.with_spec(deployer="SeldonDeployment")
STAGE = PIPELINE.spec.stages[0]
GROUPS = {variant.name: group for group in replica_groups(STAGE) for variant in group.variants}


IDENTITY = "/etc/trimtab-replicas"
SECURE = replace(
    SETTINGS,
    edge=EdgeSettings(
        tls=EdgeTls(certificate="/etc/trimtab-tls/tls.crt", key="/etc/trimtab-tls/tls.key"),
        keys_secret="callers",
        replicas=ReplicaIdentity(
            certificate=f"{IDENTITY}/tls.crt", key=f"{IDENTITY}/tls.key", ca=f"{IDENTITY}/ca.crt", name="replicas.team"
        ),
    ),
    edge_image="registry/envoy:1",
    edge_tls_secret="certificate",
    edge_replicas_secret="identity",
    edge_jwks_config_map="issuers",
    otlp_collector="collector:4317",
    admin_peers=({"podSelector": {"matchLabels": {"app": "prometheus"}}},),
)


def hosting_set(variant: str, settings: Settings = SETTINGS) -> list[dict[str, Any]]:
    group = GROUPS[variant]
    return [
        replica_group(PIPELINE, STAGE, group, settings, replicas=2, surge=True),
        service(PIPELINE, STAGE, group, settings),
        replica_group_budget(PIPELINE, STAGE, group),
    ]


def chat_replicas(chats: InferencePipeline) -> list[dict[str, Any]]:
    pipeline = owned(chats)
    (stage,) = pipeline.spec.stages
    (group,) = replica_groups(stage)
    replicas = replica_group(pipeline, stage, group, SETTINGS, replicas=1, surge=True)
    return [replicas, *replica_monitors(pipeline), service(pipeline, stage, group, SETTINGS)]


def router(settings: Settings) -> list[dict[str, Any]]:
    """A router's objects; Envoy's own configuration has goldens of its own."""
    written = router_objects(PIPELINE, a_plan(PIPELINE), settings, pod_monitor=True)
    for one in written:
        if one["kind"] == "ConfigMap":
            one["data"]["envoy.json"] = sorted(json.loads(one["data"]["envoy.json"]))
        if one["kind"] == "Deployment":
            del one["spec"]["template"]["metadata"]["annotations"]["trimtab.dev/pipeline-hash"]
    return written


def profiling() -> list[dict[str, Any]]:
    jobs = [profile_job(PIPELINE, task, SETTINGS) for task in profile_tasks(PIPELINE)]
    return [*profiler_account(PIPELINE, SETTINGS), *jobs]


def registered_tasks() -> list[dict[str, Any]]:
    """What a stage that reads the task of each row has in addition."""
    document = tasked_document(variants=[VARIANTS[0]])
    pipeline = owned(InferencePipeline.model_validate(document))
    (stage,) = pipeline.spec.stages
    group = replica_group(pipeline, stage, replica_groups(stage)[0], SETTINGS, replicas=1, surge=True)
    return [*task_objects(pipeline, pipeline_labels(pipeline, ROUTER)), group]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("model-server", hosting_set("small")),
        ("registered-tasks", registered_tasks()),
        ("gpu", hosting_set("large")),
        ("container", hosting_set("own")),
        ("engine", chat_replicas(an_engine_pipeline())[::2]),
        ("chatting", chat_replicas(a_chat_pipeline())[:2]),
        ("model-server-secure", hosting_set("small", SECURE)),
        ("container-secure", hosting_set("own", SECURE)),
        ("router", router(SETTINGS)),
        ("router-secure", router(SECURE)),
        ("isolation", network_policies(PIPELINE, SETTINGS)),
        ("isolation-secure", network_policies(PIPELINE, SECURE)),
        ("profiling", profiling()),
        ("seldon", [replica_group(SELDON, STAGE, GROUPS["small"], SETTINGS, replicas=2, surge=True)]),
        ("seldon-gpu", [replica_group(SELDON, STAGE, GROUPS["large"], SETTINGS, replicas=1, surge=True)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_manifests_match_golden_files(name: str, written: list[dict[str, Any]]) -> None:
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("TRIMTAB_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump_all(written, sort_keys=True, width=120))

    assert list(yaml.safe_load_all(path.read_text())) == written


@pytest.mark.parametrize(("latency", "seconds"), [("400ms", 60), ("45500ms", 76), ("120s", 150), ("1h", 630)])
def test_termination_grace_period_follows_the_slo(latency: str, seconds: int) -> None:
    pipeline = owned(a_pipeline(slo={"latency": latency}))
    written = router_objects(pipeline, None, SETTINGS, pod_monitor=False)
    for group in replica_groups(pipeline.spec.stages[0]):
        written.append(replica_group(pipeline, pipeline.spec.stages[0], group, SETTINGS, replicas=1, surge=True))
    pods = [one["spec"]["template"]["spec"] for one in written if one["kind"] == "Deployment"]

    assert {pod["containers"][0]["name"] for pod in pods} == {"router", "model-server"}
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {seconds}


@pytest.mark.parametrize(
    ("bounds", "planned", "replicas"), [({}, 3, 3), ({"replicas": 2}, 1, 2), ({"maxReplicas": 2}, 3, 2)]
)
def test_routers_are_as_many_as_planned(bounds: dict[str, int], planned: int, replicas: int) -> None:
    pipeline = owned(a_pipeline(router=bounds))
    plan = a_plan(pipeline)
    plan = plan.with_spec(routers=planned)
    written = router_objects(pipeline, plan, SETTINGS, pod_monitor=False)

    assert [one["spec"]["replicas"] for one in written if one["kind"] == "Deployment"] == [replicas]


def test_pipeline_image_replaces_the_model_server_image() -> None:
    """Its model servers and its profiler run it, and what was measured with another image no longer counts."""
    ours, theirs = a_pipeline(), a_pipeline(modelServerImage="registry/acme:1")
    (stage,) = theirs.spec.stages
    (group,) = replica_groups(stage)
    (before,), (task,) = profile_tasks(ours), profile_tasks(theirs)
    pods = (replica_group(theirs, stage, group, SETTINGS, replicas=1, surge=True), profile_job(theirs, task, SETTINGS))
    images = [pod["spec"]["template"]["spec"]["containers"][0]["image"] for pod in pods]

    assert images == ["registry/acme:1"] * 2
    assert task.fingerprint != before.fingerprint


def test_profile_inputs_come_from_the_annotation() -> None:
    """The profiler reads it where the operator writes the pipeline for it, and measures anew where it is another."""
    ours, theirs = a_pipeline(), a_pipeline()
    theirs.metadata.annotations.update({"trimtab.dev/payloads": "x=frames", "kubectl.kubernetes.io/other": "y"})
    (before,), (task,) = profile_tasks(ours), profile_tasks(theirs)

    assert router_pipeline(theirs).metadata.annotations == {"trimtab.dev/payloads": "x=frames"}
    assert task.fingerprint != before.fingerprint


def test_changed_tensor_shape_reprofiles_its_consumers() -> None:
    def fingerprints(shape: list[int], answered: str = "FP32") -> list[str]:
        first = a_stage(variants=[a_variant(nodeSelector={"disk": "ssd"})])
        first["outputs"] = [{"name": "y", "datatype": answered, "shape": [1]}]
        inputs = [{"name": "x", "datatype": "FP32", "shape": shape}]
        spec = a_pipeline([first, a_stage("second", "first.outputs.y")], inputs=inputs)
        return [task.fingerprint for task in profile_tasks(spec)]

    first, second = fingerprints([4])
    assert fingerprints([4]) == [first, second]
    assert fingerprints([3, 512, 512])[0] != first
    assert fingerprints([3, 512, 512])[1] == second
    assert fingerprints([4], "FP64")[0] == first
    assert fingerprints([4], "FP64")[1] != second


def test_only_a_longer_slo_profiles_excluded_batch_sizes() -> None:
    """The Job has another name, since the earlier one may still exist for its log."""

    def within(latency: str) -> InferencePipeline:
        return a_pipeline(slo={"latency": latency})

    (task,) = profile_tasks(within("500ms"))
    complete = a_profile("stage-0", [a_point_profile()])
    complete.metadata.annotations[FINGERPRINT_ANNOTATION] = task.fingerprint
    cut = complete.with_spec(longest_batch_seconds=0.5)

    assert [missing_profile_tasks(within(latency), [complete]) for latency in ("100ms", "500ms", "10s")] == [(), (), ()]
    assert [missing_profile_tasks(within(latency), [cut]) for latency in ("100ms", "500ms")] == [(), ()]
    (again,) = missing_profile_tasks(within("10s"), [cut])
    assert again.fingerprint == task.fingerprint
    names = {profile_job(within("500ms"), one, SETTINGS)["metadata"]["name"] for one in (task, again)}
    assert len(names) == 2


def test_secrets_have_separate_profile_tasks() -> None:
    """Two Secrets in one pod would set the same variables, and one of them would win."""
    kinds = {"open": None, "one": "bucket-a", "other": "bucket-b", "also": "bucket-a"}
    variants = [a_variant(name, **({"secretName": secret} if secret else {})) for name, secret in kinds.items()]
    pipeline = a_pipeline([a_stage(variants=variants)])
    tasks = profile_tasks(pipeline)
    jobs = [profile_job(pipeline, task, SETTINGS) for task in tasks]
    taken = [job["spec"]["template"]["spec"]["containers"][0].get("envFrom", []) for job in jobs]

    assert [task.variants_by_stage["first"] for task in tasks] == [("open",), ("one", "also"), ("other",)]
    assert len({task.name for task in tasks}) == len({job["metadata"]["name"] for job in jobs}) == 3
    named = [[source["secretRef"]["name"] for source in sources] for sources in taken]
    assert named == [[], ["bucket-a"], ["bucket-b"]]
    assert all(source["prefix"] == "TRIMTAB_SECRET_" for sources in taken for source in sources)
    unnamed = profile_tasks(a_pipeline([a_stage(variants=[a_variant("open")])]))
    assert [task.name for task in unnamed] == [tasks[0].name]  # without a Secret all is as it was before there were any


async def test_api_server_stores_every_manifest_as_written(cluster: Cluster, namespace: str) -> None:
    """The stored objects contain every field as it was sent; otherwise each reconciliation would write again."""
    pipeline = PIPELINE.with_metadata(namespace=namespace)
    manifests = [
        *router_objects(pipeline, a_plan(pipeline), SETTINGS, pod_monitor=False),
        *network_policies(pipeline, SETTINGS),
    ]
    for group in GROUPS.values():
        manifests += [
            replica_group(pipeline, STAGE, group, SETTINGS, replicas=1, surge=True),
            service(pipeline, STAGE, group, SETTINGS),
        ]
    manifests += [profile_job(pipeline, task, SETTINGS) for task in profile_tasks(pipeline)]
    for manifest in manifests:
        answer = await cluster.apply(manifest, manager="tests", dry_run=True)

        assert contains(answer, manifest), manifest["kind"]


@pytest.fixture
async def seldon(cluster: Cluster) -> Any:
    """A stand-in for Seldon's own definition, which accepts every spec."""
    group, plural, anything = "machinelearning.seldon.io", "seldondeployments", "x-kubernetes-preserve-unknown-fields"
    schema = {"type": "object", "properties": {"spec": {"type": "object", anything: True}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "SeldonDeployment", "plural": plural, "singular": "seldondeployment"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
    await define(cluster, definition)
    yield
    await cluster.delete("CustomResourceDefinition", None, f"{plural}.{group}")


async def test_changed_deployer_replaces_objects_once_ready(seldon: None, cluster: Cluster, namespace: str) -> None:
    """The old pods have the labels of the new ones and serve until then, in both directions."""
    site = Site(cluster, namespace, a_pipeline_document(1))
    site.machinery.seldon = True
    await site.apply_profiled()
    await site.apply_plan()
    await site.settle()
    name, before = next(iter(await site.names("Deployment") - {"sample-router"})), "Deployment"
    for after in ("SeldonDeployment", "Deployment"):
        site.document["spec"]["deployer"] = after
        await site.apply_pipeline()
        await site.look()
        assert name in await site.names(after)
        assert name in await site.names(before), "nothing of the new one is ready"
        conditions = await site.conditions()
        assert conditions["PlanApplied"] == ("Unknown", "Applying")
        assert conditions["StagesReady"] == ("True", "RollingOut"), "the old one serves"
        await site.machinery.step()
        await site.look()
        assert name in await site.names(after)
        assert name not in await site.names(before)
        assert name in await site.names("Service") & await site.names("PodDisruptionBudget")
        assert (await site.conditions())["PlanApplied"][0] == "True"
        await site.machinery.step()
        assert await site.look() == 0
        before = after


def test_files_of_the_envoy_config_are_mounted() -> None:
    """A file that tells of its certificates and is not there would keep it from opening the door."""
    written = router_objects(PIPELINE, a_plan(PIPELINE), SECURE, pod_monitor=False)
    config = next(one["data"] for one in written if one["kind"] == "ConfigMap")
    pod = next(one["spec"]["template"]["spec"] for one in written if one["kind"] == "Deployment")
    folders = {mount["name"]: mount["mountPath"] for mount in pod["initContainers"][0]["volumeMounts"]}

    looked_for = [Path(path) for path in _values_of("path", json.loads(config["envoy.json"])) if path.endswith(".json")]
    secrets = [json.loads(config[path.name]) for path in looked_for]
    certificates = [Path(name) for secret in secrets for name in _values_of("filename", secret)]

    assert {path.parent for path in looked_for} == {Path(folders["config"])}
    assert {path.parent for path in certificates} == {Path(folders["tls"])}


def _values_of(key: str, document: Any) -> list[str]:
    if isinstance(document, list):
        return [value for one in document for value in _values_of(key, one)]
    if not isinstance(document, dict):
        return []
    own = [document[key]] if isinstance(document.get(key), str) else []
    return own + [value for one in document.values() for value in _values_of(key, one)]


def test_added_task_changes_the_pod_template():
    def deployed(**changes: Any) -> dict[str, Any]:
        document = a_pipeline_document([a_stage(variants=[a_variant(**changes)])])
        pipeline = InferencePipeline.model_validate(document)
        (stage,) = pipeline.spec.stages
        return replica_group(pipeline, stage, replica_groups(stage)[0], SETTINGS, replicas=1, surge=False)

    task = {"name": "late", "storageUri": "s3://models/late.safetensors", "utility": 0.5}
    before, after = deployed(), deployed(tasks=[task])
    (container,) = after["spec"]["template"]["spec"]["containers"]
    (model,) = json.loads(next(one["value"] for one in container["env"] if one["name"] == "TRIMTAB_MODELS"))

    assert model["tasks"] == [task]
    assert before["spec"]["template"] != after["spec"]["template"]


def deployed(pipeline: InferencePipeline, settings: Settings = SETTINGS) -> dict[str, Any]:
    (stage,) = pipeline.spec.stages
    (group,) = replica_groups(stage)
    return dict(replica_group(pipeline, stage, group, settings, replicas=1, surge=False)["spec"]["template"]["spec"])


def test_many_models_fit_the_environment():
    """The largest pipeline that passes validation starts: Linux bounds each variable to 128 KiB."""
    points = [{"name": f"point-{number:02}", "accuracy": 0.5} for number in range(32)]
    variants = [a_variant(f"variant-{number:02}", operatingPoints=points) for number in range(64)]
    pipeline = InferencePipeline.model_validate(a_pipeline_document([a_stage(variants=variants, batchSizes=[1])]))
    (container,) = deployed(pipeline)["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}

    assert max(len(f"{name}={value}".encode()) for name, value in environment.items()) < 2**17
    models = json.loads(join_variable("TRIMTAB_MODELS", environment))
    assert [model["name"] for model in models] == [variant["name"] for variant in variants]
    assert all(len(model["operatingPoints"]) == 32 for model in models)


@pytest.mark.parametrize("image", [None, "registry/own:1"])
def test_node_cache_is_a_folder_of_the_namespace(image):
    pipeline = owned(a_pipeline([a_stage()], **({"modelServerImage": image} if image else {})))
    pod = deployed(pipeline, replace(SETTINGS, node_cache="/var/cache/trimtab"))
    (container,) = pod["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "weights"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "weights"]

    namespace = pipeline.metadata.namespace
    assert mount.get("subPath") == (None if image else namespace)
    assert ("hostPath" in volume) == (image is None)
    shared = {one["value"] for one in container["env"] if one["name"] == "TRIMTAB_WEIGHTS_CACHE_TENANT"}
    assert shared == (set() if image else {namespace})


def test_pod_monitor_selects_the_metrics_port_of_the_pods() -> None:
    made, monitor, _ = chat_replicas(a_chat_pipeline())
    pods = made["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    named = {port["name"]: port["containerPort"] for port in pods["spec"]["containers"][0]["ports"]}
    arguments = pods["spec"]["containers"][0]["args"]

    assert arguments[arguments.index("--metrics-port") + 1] == str(named[endpoint["port"]])
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    borne = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label) for label in pods["metadata"]["labels"]}
    taken = {each["targetLabel"]: each["sourceLabels"][0] for each in endpoint["relabelings"]}
    assert taken.pop("namespace") == "__meta_kubernetes_namespace"
    assert (set(taken), set(taken.values()) - borne) == ({"pipeline", "stage"}, set())
    assert replica_monitors(a_pipeline()) == []


@pytest.mark.parametrize("kinds", [frozenset(), frozenset({"PodMonitor"})], ids=["not scraped", "scraped"])
def test_chat_replicas_are_scraped_if_routers_are(kinds: frozenset[str]) -> None:
    document = owned(a_chat_pipeline()).model_dump(mode="json", by_alias=True, exclude_none=True)
    written = reconcile(ObservedState(document, kinds=kinds), SETTINGS, 0.0).apply
    scraped = {one["metadata"]["name"] for one in written if one["kind"] == "PodMonitor"}

    assert scraped == ({"sample-router", "sample-router-only"} if kinds else set())


@pytest.mark.parametrize(
    ("engine", "args", "gpus", "seconds"),
    [("vllm", [], 1, 55), ("vllm", ["--shutdown-timeout=40"], 2, 5), ("sglang", [], 1, 5)],
)
def test_engine_ends_its_answers_before_it_is_stopped(engine: str, args: list[str], gpus: int, seconds: int) -> None:
    container = {"image": "engine:1", "engine": engine, "args": ["--port", "$(PORT)", *args], "port": 8000}
    served = a_variant(family="", storageUri="", container=container, resources={"gpu": gpus})
    pod = deployed(owned(a_chat_pipeline([a_writer(variants=[served])], slo={"latency": "50s"})))
    (own,) = pod["containers"]

    assert own["lifecycle"]["preStop"]["sleep"]["seconds"] == seconds
    assert pod["terminationGracePeriodSeconds"] > 55
    assert own["env"] == [{"name": "PORT", "value": "8000"}]
    memory = [volume for volume in pod["volumes"] if volume.get("emptyDir") == {"medium": "Memory"}]
    assert [mount["mountPath"] for mount in own["volumeMounts"][1:]] == ["/dev/shm"] * len(memory)  # noqa: S108
    assert len(memory) == (gpus > 1)
