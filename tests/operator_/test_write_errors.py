"""Foreign objects, rejected manifests and altered writes: reported in a condition, without effect on others."""

from dataclasses import replace
from typing import Any

import pytest

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.operator_.conftest import SETTINGS, Site
from trimtab_kubernetes import Cluster
from trimtab_operator.applier import PATCH_MANAGER
from trimtab_operator.reconciliation.object_diff import difference
from trimtab_operator.reconciliation.write_errors import INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from trimtab_pipelines.kubernetes_names import MANAGED_BY, OPERATOR_MANAGER, PIPELINE_LABEL, replica_group_name

SELECTOR = {"app": "other"}


async def a_foreign_object(site: Site, kind: str, name: str, **metadata: Any) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        "Service": {"spec": {"selector": SELECTOR, "ports": [{"port": 80}]}},
        "ConfigMap": {"data": {"theirs": "1"}},
        "ServiceAccount": {},
        "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": SELECTOR}}},
        "Deployment": {
            "spec": {
                "selector": {"matchLabels": SELECTOR},
                "template": {
                    "metadata": {"labels": SELECTOR},
                    "spec": {"containers": [{"name": "theirs", "image": "theirs:1"}]},
                },
            }
        },
    }
    versions = {"NetworkPolicy": "networking.k8s.io/v1", "Deployment": "apps/v1"}
    named: dict[str, Any] = {"apiVersion": versions.get(kind, "v1"), "kind": kind}
    named["metadata"] = {"name": name, "namespace": site.namespace, **metadata}
    return await site.cluster.create({**named, **bodies[kind]}, manager="kubectl-create")


def _by_its_owner(found: dict[str, Any]) -> tuple[Any, ...]:
    """All of an object but its status, which is the cluster's."""
    metadata = found["metadata"]
    marks = (metadata.get(name) for name in ("uid", "labels", "ownerReferences", "generation"))
    return (*marks, found.get("spec"), found.get("data"))


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        *((kind, {}) for kind in ("Service", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Deployment")),
        ("Service", {"labels": {MANAGED_BY: OPERATOR_MANAGER, PIPELINE_LABEL: "other"}}),
    ],
)
async def test_foreign_objects_are_not_overwritten(site: Site, kind: str, metadata: dict[str, Any]) -> None:
    """Nor do they get an owner reference, which would delete them with the pipeline."""
    before = await a_foreign_object(site, kind, "sample-router", **metadata)
    await site.serve()

    after = await site.get(kind, "sample-router")
    assert _by_its_owner(after) == _by_its_owner(before)
    assert (await site.conditions())["ObjectsWritten"] == ("False", "NotOwned")
    said = await site.message("ObjectsWritten")
    owner = "another owner" if kind == "ServiceAccount" else OPERATOR_MANAGER if metadata else "kubectl-create"
    assert said.startswith(f"{kind} sample-router belongs to {owner}")
    assert (await site.conditions())["Ready"] == ("False", "NotOwned")
    assert ("NotOwned", said) in await site.events()
    # All the rest is there.
    assert await site.replicas() == {"small": 1}
    wanted = {"Service", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Deployment", "RoleBinding"} - {kind}
    for other in wanted:
        assert "sample-router" in await site.names(other)


async def test_object_is_created_once_the_foreign_one_is_gone(site: Site) -> None:
    await a_foreign_object(site, "Service", "sample-router")
    await site.apply_pipeline()
    await site.settle()
    assert await site.look() == 0, "it tries later, not again and again"
    await site.cluster.delete("Service", site.namespace, "sample-router")
    site.ahead_seconds += MAX_BACKOFF_SECONDS
    await site.settle()

    found = await site.get("Service", "sample-router")
    assert found["spec"]["selector"]["trimtab.dev/pipeline"] == "sample"
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


async def test_orphans_of_an_earlier_pipeline_are_adopted(site: Site) -> None:
    marks = {MANAGED_BY: OPERATOR_MANAGER, PIPELINE_LABEL: "sample"}
    await a_foreign_object(site, "ConfigMap", "sample-router", labels=marks)
    await site.apply_pipeline()
    await site.settle()
    found = await site.get("ConfigMap", "sample-router")

    assert [owner["name"] for owner in found["metadata"]["ownerReferences"]] == ["sample"]
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


async def test_object_recreated_by_another_owner_is_not_overwritten(site: Site) -> None:
    """It was replaced between two reconciliations and is not in the cache yet; its uid differs."""
    await site.apply_pipeline()
    await site.settle()
    await site.cluster.delete("ConfigMap", site.namespace, "sample-router")
    before = await a_foreign_object(site, "ConfigMap", "sample-router")
    await site.apply_profiles()
    await site.apply_plan(1)
    found = await site.get("PipelinePlan", "sample")
    site.controller.store.objects.put(found)
    await site.controller.reconcile((site.namespace, "sample"))
    await site.settle()

    assert await site.get("ConfigMap", "sample-router") == before
    assert (await site.conditions())["ObjectsWritten"] == ("False", "NotOwned")


async def test_rejected_manifest_does_not_block_others_or_the_status(cluster: Cluster, namespace: str) -> None:
    """The value passes the validation of the pipeline, but labels must not have spaces."""
    broken = a_stage("first", variants=[a_variant("small", nodeSelector={"gpu": "has space"})])
    sound = a_stage("second", "first.outputs.y")
    site = Site(cluster, namespace, a_pipeline_document([broken, sound]))
    await site.serve()

    assert (await site.conditions())["ObjectsWritten"] == ("False", "WriteRejected")
    said = await site.message("ObjectsWritten")
    name = replica_group_name("sample", "first", "small")
    assert said.startswith(f"Deployment {name} was refused: ")
    assert "has space" in said
    assert replica_group_name("sample", "second", "small") in await site.names("Deployment")
    assert (await site.status())["observedGeneration"] == 1
    assert await site.look() == 0

    site.document["spec"]["stages"][0]["variants"][0]["nodeSelector"] = {"gpu": "l4"}
    await site.apply_profiled()
    await site.settle()
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


async def test_scaling_a_removed_variant_keeps_its_other_fields(site: Site) -> None:
    await site.serve()
    del site.document["spec"]["stages"][0]["variants"][0]
    await site.apply_profiled()
    name = replica_group_name("sample", "first", "small")
    before = await site.get("Deployment", name)
    await site.apply_plan(2)
    site.machinery.drains = False  # so that it is still there once it is scaled to nothing
    await site.settle()
    after = await site.get("Deployment", name)

    assert after["spec"] == before["spec"] | {"replicas": 0}
    owned = {entry["manager"]: entry["fieldsV1"] for entry in after["metadata"]["managedFields"]}
    assert owned[PATCH_MANAGER] == {"f:spec": {"f:replicas": {}}}


@pytest.mark.parametrize(("before", "after"), [("ClusterRole", "Role"), ("Role", "ClusterRole")])
async def test_changed_role_kind_replaces_the_bindings(
    cluster: Cluster, namespace: str, before: str, after: str
) -> None:
    """As when `namespaces` of the chart changes: no binding's role can be changed, only the binding replaced."""
    site = Site(cluster, namespace, a_pipeline_document([a_stage()]), settings=replace(SETTINGS, role_kind=before))
    await site.apply_pipeline()
    await site.settle()
    site.settings = replace(SETTINGS, role_kind=after)
    site.restart()
    await site.settle()
    found = (await cluster.list("RoleBinding", namespace)).items

    assert {binding["metadata"]["name"] for binding in found} == {"sample-router", "sample-profiler"}
    assert {binding["roleRef"]["kind"] for binding in found} == {after}
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


async def test_profile_job_is_replaced_when_its_image_changes(cluster: Cluster, namespace: str) -> None:
    """A Job's pod template is immutable, and a Job with an absent image would stay for an hour."""
    settings = replace(SETTINGS, model_server_image="bad")
    site = Site(cluster, namespace, a_pipeline_document([a_stage()]), settings=settings)
    await site.apply_pipeline()
    await site.settle()
    (before,) = await site.names("Job")
    site.settings = replace(SETTINGS, model_server_image="good")
    site.restart()
    await site.settle()
    (job,) = (await cluster.list("Job", namespace)).items

    assert job["metadata"]["name"] == before, "the name of the Job follows from its task"
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "good"
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")
    assert (await site.conditions())["ProfilesReady"] == ("False", "Profiling")


SERVER = replica_group_name("sample", "first", "small")


class AlteringCluster:
    """A cluster that passes on all calls; subclasses alter what is applied."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.changes, self.written = cluster, True, 0
        self.applied: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


class LifecycleRemover(AlteringCluster):
    """A webhook removes the lifecycle of containers."""

    async def apply(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.applied.append((body["kind"], body["metadata"]["name"]))
        if self.changes and body["kind"] == "Deployment" and "template" in body.get("spec", {}):
            pods = body["spec"]["template"]
            kept = [
                {key: value for key, value in container.items() if key != "lifecycle"}
                for container in pods["spec"]["containers"]
            ]
            template = {**pods, "spec": {**pods["spec"], "containers": kept}}
            body = {**body, "spec": {**body["spec"], "template": template}}
        return await self._cluster.apply(body, **options)


@pytest.mark.parametrize("memory", ["500M", "1G", "1Ti"])
async def test_normalized_quantities_are_written_once(cluster: Cluster, namespace: str, memory: str) -> None:
    variant = a_variant("small", resources={"cpu": "0.3333", "memory": memory})
    document = a_pipeline_document([a_stage(variants=[variant])], router={"resources": {"memory": memory}})
    site = Site(cluster, namespace, document)
    await site.serve()
    found = await cluster.get("Deployment", namespace, SERVER)

    assert found is not None
    requests = found["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests["cpu"] == "334m", "the cluster's own spelling, or nothing is tested here"
    assert await site.look() == 0
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


async def test_field_removed_by_a_webhook_is_retried_and_reported(site: Site) -> None:
    changing = LifecycleRemover(site.cluster)
    site.restart(changing)
    await site.serve()

    assert changing.applied.count(("Deployment", SERVER)) == 1, "its clock stood still: once is enough"
    assert (await site.conditions())["ObjectsWritten"] == ("False", "FieldNotApplied")
    said = await site.message("ObjectsWritten")
    assert f"Deployment {SERVER}" in said
    assert "spec.template.spec.containers[model-server].lifecycle" in said
    assert await site.replicas() == {"small": 1}
    outcome = await site.controller.reconcile((site.namespace, "sample"))
    assert outcome.writes == 0
    assert outcome.requeue_after_seconds is not None
    assert 0 < outcome.requeue_after_seconds <= INITIAL_BACKOFF_SECONDS

    site.ahead_seconds += INITIAL_BACKOFF_SECONDS
    await site.settle()
    assert changing.applied.count(("Deployment", SERVER)) == 2

    changing.changes = False
    site.ahead_seconds += MAX_BACKOFF_SECONDS
    await site.settle()
    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")


class OlderDefinition(AlteringCluster):
    """Resource definitions without `url` in a status, which the cluster therefore removes."""

    async def apply(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        if options.get("subresource") == "status" and body["kind"] == "InferencePipeline":
            self.written += 1
            body = {**body, "status": {key: value for key, value in body["status"].items() if key != "url"}}
        return await self._cluster.apply(body, **options)


async def test_altered_status_is_written_once_per_change(site: Site) -> None:
    older = OlderDefinition(site.cluster)
    site.restart(older)
    await site.serve()
    before = older.written

    assert await site.look() == 0
    assert older.written == before
    await site.apply_plan(2)
    await site.settle()
    assert older.written > before
    assert await site.look() == 0


@pytest.mark.parametrize(("cores", "since"), [("many", "2026-01-01T00:00:00Z"), ("2", "soon")])
async def test_invalid_schedulable_capacity_is_recomputed(site: Site, cores: str, since: str) -> None:
    await site.serve()
    status: dict[str, Any] = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline"}
    status |= {"metadata": {"name": "sample", "namespace": site.namespace}}
    status |= {"status": {"schedulable": {"cores": cores, "since": since}}}
    await site.cluster.apply(status, manager="other", subresource="status")
    await site.settle()

    assert (await site.conditions())["PlanApplied"][0] == "True"


async def test_field_restored_by_a_client_is_no_longer_reported(site: Site) -> None:
    """Nothing has to be written then, and nothing is to be tried again at once, for ever."""
    changing = LifecycleRemover(site.cluster)
    site.restart(changing)
    await site.serve()
    lifecycle = {"preStop": {"sleep": {"seconds": 5}}}
    containers = [{"name": "model-server", "lifecycle": lifecycle}]
    patch: dict[str, Any] = {"apiVersion": "apps/v1", "kind": "Deployment"}
    patch["metadata"] = {"name": SERVER, "namespace": site.namespace}
    await site.cluster.apply({**patch, "spec": {"template": {"spec": {"containers": containers}}}}, manager="other")
    await site.settle()

    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")
    outcome = await site.controller.reconcile((site.namespace, "sample"))
    assert outcome.requeue_after_seconds is None


@pytest.mark.parametrize(
    ("live", "wanted", "path"),
    [
        ({"limits": {"memory": "500M"}}, {"limits": {"memory": "500000000"}}, None),
        ({"limits": {"memory": "500M"}}, {"limits": {"memory": "500Mi"}}, "limits.memory"),
        ({"requests": {"cpu": "334m"}}, {"requests": {"cpu": "333.3m"}}, None),
        ({"requests": {"cpu": "334m"}}, {"requests": {"cpu": "332.9m"}}, "requests.cpu"),
        ({"limits": {"memory": "none"}}, {"limits": {"memory": "500M"}}, "limits.memory"),
        ({"labels": {"version": "1.0"}}, {"labels": {"version": "1"}}, "labels.version"),
        ({"ports": [{"name": "b"}]}, {"ports": [{"name": "a", "port": 1}]}, "ports[a]"),
        ({"args": ["a"]}, {"args": ["a", "b"]}, "args"),
        ({"args": None}, {"args": []}, None),
        (None, {"spec": {"a": ""}}, ""),
    ],
)
def test_only_quantities_are_compared_as_numbers(live: Any, wanted: Any, path: str | None) -> None:
    assert difference(live, wanted) == path
