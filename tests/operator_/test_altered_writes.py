"""Objects that a cluster stores altered: equal quantities are ignored, other changes are reported."""

from typing import Any

import pytest

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.operator_.scene import Site
from trimtab_kubernetes import Cluster
from trimtab_operator.reconciliation.object_diff import difference
from trimtab_operator.reconciliation.write_errors import INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from trimtab_pipelines.kubernetes_names import replica_group_name

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


async def test_field_removed_by_a_webhook_is_retried_and_reported(cluster: Cluster, namespace: str) -> None:
    changing = LifecycleRemover(cluster)
    site = Site(cluster, namespace, a_pipeline_document([a_stage(variants=[a_variant("small")])]))
    site.restart(changing)
    await site.serve()

    assert changing.applied.count(("Deployment", SERVER)) == 1, "its clock stood still: once is enough"
    assert (await site.conditions())["ObjectsWritten"] == ("False", "FieldNotApplied")
    said = await site.message("ObjectsWritten")
    assert f"Deployment {SERVER}" in said
    assert "spec.template.spec.containers[model-server].lifecycle" in said
    assert await site.replicas() == {"small": 1}
    outcome = await site.controller.reconcile((namespace, "sample"))
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


async def test_altered_status_is_written_once_per_change(cluster: Cluster, namespace: str) -> None:
    older = OlderDefinition(cluster)
    site = Site(cluster, namespace, a_pipeline_document([a_stage(variants=[a_variant("small")])]))
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
async def test_invalid_schedulable_capacity_is_recomputed(
    cluster: Cluster, namespace: str, cores: str, since: str
) -> None:
    site = Site(cluster, namespace, a_pipeline_document([a_stage(variants=[a_variant("small")])]))
    await site.serve()
    status: dict[str, Any] = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline"}
    status |= {"metadata": {"name": "sample", "namespace": namespace}}
    status |= {"status": {"schedulable": {"cores": cores, "since": since}}}
    await cluster.apply(status, manager="other", subresource="status")
    await site.settle()

    assert (await site.conditions())["PlanApplied"][0] == "True"


async def test_field_restored_by_a_client_is_no_longer_reported(cluster: Cluster, namespace: str) -> None:
    """Nothing has to be written then, and nothing is to be tried again at once, for ever."""
    changing = LifecycleRemover(cluster)
    site = Site(cluster, namespace, a_pipeline_document([a_stage(variants=[a_variant("small")])]))
    site.restart(changing)
    await site.serve()
    lifecycle = {"preStop": {"sleep": {"seconds": 5}}}
    containers = [{"name": "model-server", "lifecycle": lifecycle}]
    patch: dict[str, Any] = {"apiVersion": "apps/v1", "kind": "Deployment"}
    patch["metadata"] = {"name": SERVER, "namespace": namespace}
    await cluster.apply({**patch, "spec": {"template": {"spec": {"containers": containers}}}}, manager="other")
    await site.settle()

    assert (await site.conditions())["ObjectsWritten"] == ("True", "AllWritten")
    outcome = await site.controller.reconcile((namespace, "sample"))
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
