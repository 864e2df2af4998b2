"""Operator against a real API server: objects that it writes, restores and leaves unchanged."""

from unittest.mock import Mock

import pytest

from tests.operator_.conftest import Site
from trimtab_operator.controller import RESYNC_SECONDS
from trimtab_operator.reconcile import reconcile
from trimtab_operator.reconciliation.plan_history import RETRY_SECONDS
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER, replica_group_name, router_name


@pytest.fixture
async def serving(site: Site) -> Site:
    await site.serve()
    return site


async def test_pipeline_without_profile_is_profiled_first(site) -> None:
    """Before anything is planned a Job measures, visibly; the router is there already."""
    await site.apply_pipeline()

    assert await site.look() > 0
    jobs = await site.names("Job")
    assert len(jobs) == 1
    assert (await site.conditions())["ProfilesReady"] == ("False", "Profiling")
    assert (await site.conditions())["PlanApplied"] == ("False", "AwaitingPlan")
    assert (await site.status())["reason"] == "Profiling"
    assert jobs.pop() in await site.message("ProfilesReady")
    assert await site.names("Deployment") == {"sample-router"}
    assert await site.names("ServiceAccount") == {"sample-router", "sample-profiler"}


async def test_plan_is_applied(serving) -> None:
    name = replica_group_name("sample", "first", "small")
    service = await serving.get("Service", name)
    status = await serving.status()

    assert (await serving.names("Job"), await serving.names("ServiceAccount")) == (set(), {"sample-router"})
    assert await serving.replicas() == {"small": 1}
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["labels"]["variant.trimtab.dev/small"] == "true"
    assert await serving.good_plan() == 1
    assert set((await serving.conditions()).values()) == {
        ("True", reason) for reason in ("Ready", "AllWritten", "AllProfiled", "Applied", "AllReady", "RouterReady")
    }
    assert status["url"] == f"http://sample-router.{serving.namespace}.svc:8080"
    assert status["planGeneration"] == 1
    assert status["cores"] == "1"
    assert status["stages"][0]["readyReplicas"] == 1
    assert await serving.events() == [("PlanApplied", "why plan 1")]
    plan = await serving.get("PipelinePlan", "sample")
    assert plan["status"]["appliedGeneration"] == 1
    assert plan["status"]["conditions"][0]["reason"] == "Applied"


async def test_objects_are_owned_by_the_pipeline(serving) -> None:
    pipeline = await serving.get("InferencePipeline", "sample")
    kinds = [
        "Deployment",
        "Service",
        "ConfigMap",
        "ServiceAccount",
        "RoleBinding",
        "NetworkPolicy",
        "PodDisruptionBudget",
    ]
    for kind in kinds:
        found = (
            await serving.cluster.list(kind, serving.namespace, f"app.kubernetes.io/managed-by={OPERATOR_MANAGER}")
        ).items

        assert found, kind
        for item in found:
            assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [pipeline["metadata"]["uid"]]
            assert "finalizers" not in item["metadata"]


async def test_defect_becomes_a_condition_of_its_pipeline(serving, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("too large")

    serving.restart()
    with monkeypatch.context() as patched:
        patched.setattr("trimtab_operator.controller.reconcile", fail)
        await serving.look()

    assert (await serving.conditions())["Ready"] == ("False", "ReconcileFailed")
    assert "OverflowError: too large" in await serving.message("Ready")
    assert "ReconcileFailed" in [reason for reason, _ in await serving.events()]
    assert await serving.replicas() == {"small": 1}
    serving.ahead_seconds += 2 * RESYNC_SECONDS
    await serving.look()
    assert (await serving.conditions())["Ready"] == ("True", "Ready")


async def test_reconciliation_is_idempotent(serving, monkeypatch) -> None:
    versions, reconciled = await serving.versions(), Mock(wraps=reconcile)
    monkeypatch.setattr("trimtab_operator.controller.reconcile", reconciled)

    assert await serving.look() == 0
    reconciled.assert_not_called()
    serving.restart()
    assert await serving.look() == 0
    reconciled.assert_called_once()
    assert await serving.versions() == versions


async def test_changed_budget_and_batch_size_restart_no_pod(serving) -> None:
    """Only the plan routers start from, and status, are written."""
    names = (replica_group_name("sample", "first", "small"), router_name("sample"))

    async def generations() -> list[int]:
        found = [await serving.get("Deployment", name) for name in names]
        return [each["metadata"]["generation"] for each in found]

    before = await generations()
    serving.document["spec"]["budget"] = {"cores": "6"}
    await serving.apply_pipeline()
    await serving.apply_plan(2, batchSize=16)
    await serving.settle()

    assert await generations() == before
    assert await serving.good_plan() == 2
    assert (await serving.status())["stages"][0]["batchSize"] == 16


async def test_changed_variant_is_ready_before_the_old_one_stops(serving) -> None:
    await serving.apply_plan(2, variant="large")
    await serving.look()

    assert await serving.replicas() == {"small": 1, "large": 1}
    assert (await serving.conditions())["PlanApplied"] == ("Unknown", "Applying")
    assert (await serving.conditions())["StagesReady"] == ("True", "RollingOut")
    assert await serving.good_plan() == 1

    await serving.settle()

    assert await serving.replicas() == {"small": 0, "large": 1}
    assert await serving.good_plan() == 2
    assert [reason for reason, _ in await serving.events()] == ["PlanApplied", "PlanApplied"]


async def test_second_group_is_ready_before_surplus_replicas_stop(serving) -> None:
    await serving.apply_plan(2, replicas=2)
    await serving.settle()
    await serving.apply_plan(3, otherGroups=[{"variant": "large", "replicas": 1}])
    await serving.look()

    assert await serving.replicas() == {"small": 2, "large": 1}

    await serving.settle()
    (stage,) = (await serving.status())["stages"]

    assert await serving.replicas() == {"small": 1, "large": 1}
    assert await serving.good_plan() == 3
    assert (stage["replicas"], stage["readyReplicas"]) == (2, 2)


async def test_capacity_is_free_only_after_a_pod_ends(serving) -> None:
    serving.document["spec"]["budget"] = {"cores": "1"}
    await serving.apply_pipeline()
    serving.machinery.drains = False
    await serving.apply_plan(2, variant="large")
    for _ in range(3):
        await serving.look()
        await serving.machinery.step()

    assert await serving.replicas() == {"small": 0, "large": 0}

    serving.machinery.drains = True
    for pod in (await serving.cluster.list("Pod", serving.namespace)).items:
        if "deletionTimestamp" in pod["metadata"]:
            await serving.machinery.end(pod)
    await serving.settle()

    assert await serving.replicas() == {"small": 0, "large": 1}


async def test_manual_edits_and_deletions_are_reverted(serving) -> None:
    name, router = replica_group_name("sample", "first", "small"), router_name("sample")
    deployment = await serving.get("Deployment", name)
    deployment["spec"]["replicas"] = 7
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "other/image:1"
    del deployment["metadata"]["labels"]["variant.trimtab.dev/small"]
    await serving.cluster.replace(deployment, manager="kubectl-edit")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": router, "namespace": serving.namespace}}
    await serving.cluster.apply({**body, "data": {"plan.json": "{}"}}, manager="other")
    for kind, gone in (
        ("Service", name),
        ("PodDisruptionBudget", name),
        ("Deployment", router),
        ("NetworkPolicy", router),
    ):
        assert await serving.cluster.delete(kind, serving.namespace, gone)
    await serving.settle()
    after = await serving.get("Deployment", name)

    assert after["spec"]["replicas"] == 1
    assert after["spec"]["template"]["spec"]["containers"][0]["image"] == "model-server:1"
    assert after["metadata"]["labels"]["variant.trimtab.dev/small"] == "true"
    assert {name, router} <= await serving.names("Service") & await serving.names("PodDisruptionBudget")
    assert router in await serving.names("NetworkPolicy")
    assert await serving.conditions() == await serving.conditions() | {"Ready": ("True", "Ready")}


async def test_fields_of_other_managers_are_kept(serving) -> None:
    name = replica_group_name("sample", "first", "small")
    metadata = {"name": name, "namespace": serving.namespace, "labels": {"team": "vision"}}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    await serving.cluster.apply(body, manager="other")

    assert await serving.look() == 0
    found = await serving.get("Deployment", name)
    assert found["metadata"]["labels"]["team"] == "vision"


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"variant": "huge"}, "huge"), ({"replicas": 100}, "100 cores"), ({"operatingPoint": "none"}, "none")],
)
async def test_rejected_plan_leaves_the_last_good_one_serving(serving, changes, says) -> None:
    await serving.apply_plan(2, **changes)
    await serving.settle()

    assert (await serving.conditions())["PlanApplied"] == ("False", "PlanRejected")
    assert (await serving.conditions())["StagesReady"] == ("True", "AllReady")
    assert says in await serving.message("PlanApplied")
    assert await serving.replicas() == {"small": 1}
    assert await serving.good_plan() == 1
    rejections = [found for found in await serving.operator_events() if found["reason"] == "PlanRejected"]
    assert {found["involvedObject"]["kind"] for found in rejections} == {"InferencePipeline", "PipelinePlan"}


async def test_measured_memory_raises_the_limit_of_replicas(serving) -> None:
    profile = await serving.get("ModelProfile", min(await serving.names("ModelProfile")))
    variant, peak = profile["spec"]["points"][0]["variant"], 2**31
    measured = {"loadedBytes": peak, "startPeakBytes": peak, "peakBytes": {"1": peak}}
    profile["spec"]["memory"] = {variant: measured}
    await serving.cluster.replace(profile, manager="user")
    await serving.settle()

    deployment = await serving.get("Deployment", replica_group_name("sample", "first", variant))
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "2560Mi"  # a quarter above the peak
    assert (await serving.conditions())["ProfilesReady"] == ("True", "AllProfiled")


async def test_unreadable_profile_is_named_by_condition_and_event(serving) -> None:
    name = min(await serving.names("ModelProfile"))
    profile = await serving.get("ModelProfile", name)
    profile["spec"]["points"][0]["measurements"] *= 2
    await serving.cluster.replace(profile, manager="user")
    await serving.settle()

    (event,) = [found for found in await serving.operator_events() if found["involvedObject"]["kind"] == "ModelProfile"]
    assert (event["reason"], event["type"]) == ("InvalidSpec", "Warning")
    assert "spec.points.0: measurements has a duplicate batchSize" in event["message"]
    assert f"ModelProfile {name}: spec.points.0" in await serving.message("ProfilesReady")
    assert await serving.replicas() == {"small": 1}
    assert await serving.look() == 0


async def test_advisory_plan_is_ignored(site) -> None:
    await site.apply_profiled()
    await site.apply_plan(1)
    plan = await site.get("PipelinePlan", "sample")
    plan["metadata"]["labels"] = {"trimtab.dev/advisory": "true"}
    await site.cluster.replace(plan, manager="tests")
    await site.settle()

    assert await site.replicas() == {}
    assert (await site.conditions())["PlanApplied"] == ("False", "AwaitingPlan")


async def test_plan_that_never_becomes_ready_is_reverted(serving) -> None:
    """The reason is reported at once; after the timeout the operator reverts to the last good plan."""
    serving.document["spec"]["stages"][0]["variants"][1] |= {
        "family": "",
        "storageUri": "",
        "container": {"image": "no/such:image"},
    }
    serving.machinery.broken_images = {"no/such:image"}
    await serving.apply_profiled()
    await serving.apply_plan(2, variant="large")
    await serving.settle()

    assert (await serving.conditions())["StagesReady"] == ("False", "ImagePullFailed")
    assert "no/such:image" in await serving.message("StagesReady")
    assert await serving.replicas() == {"small": 1, "large": 1}

    serving.ahead_seconds = 301.0 + 120.0
    await serving.settle()

    assert await serving.replicas() == {"small": 1, "large": 0}
    assert (await serving.conditions())["PlanApplied"] == ("False", "ReadyTimeout")
    assert (await serving.conditions())["StagesReady"] == ("True", "AllReady")
    assert await serving.good_plan() == 1

    serving.restart()
    assert await serving.look() == 0

    serving.ahead_seconds += RETRY_SECONDS + 1.0
    await serving.look()
    assert await serving.replicas() == {"small": 1, "large": 1}


async def test_schedulable_capacity_is_reported_on_small_nodes(serving) -> None:
    """A replica without a node is given up after the grace; more is tried after a while."""
    serving.machinery.cores = 2.1  # the router's tenth, and two replicas
    await serving.apply_plan(2, replicas=3)
    await serving.settle()

    assert (await serving.status()).get("schedulable") is None
    assert (await serving.conditions())["StagesReady"] == ("False", "Unschedulable")

    serving.ahead_seconds = 11.0 + 120.0
    await serving.settle()

    assert (await serving.status())["schedulable"]["cores"] == "2"
    assert (await serving.conditions())["PlanApplied"] == ("False", "Unschedulable")
    assert await serving.replicas() == {"small": 1}

    await serving.apply_plan(3, replicas=2)
    await serving.settle()

    assert (await serving.conditions())["Ready"] == ("True", "Ready")
    assert (await serving.status())["schedulable"]["cores"] == "2"

    serving.ahead_seconds += RETRY_SECONDS + 1.0
    await serving.settle()

    assert "schedulable" not in await serving.status()
    assert await serving.replicas() == {"small": 2}


async def test_last_replica_waits_for_capacity_of_a_draining_pod(serving) -> None:
    machinery = serving.machinery
    machinery.cores, machinery.drains = 1.1, False
    deployment = next(iter((await serving.cluster.list("Deployment", serving.namespace, "trimtab.dev/stage")).items))
    leaving = (await machinery.pods(deployment))[0]
    await machinery.end(leaving)
    await serving.settle()
    serving.ahead_seconds = 60.0 + 120.0
    await serving.settle()

    assert await serving.replicas() == {"small": 1}
    assert (await serving.status()).get("schedulable") is None

    machinery.drains = True
    await machinery.end(leaving)
    await serving.settle()

    assert await serving.replicas() == {"small": 1}


async def test_paused_pipeline_keeps_its_plan(serving) -> None:
    serving.document["spec"]["mode"] = "Paused"
    await serving.apply_pipeline()
    await serving.apply_plan(2, replicas=2)
    await serving.settle()

    assert await serving.replicas() == {"small": 1}
    assert (await serving.conditions())["PlanApplied"] == ("True", "Paused")


async def test_changed_pipeline_rolls_its_router_and_prunes_objects(serving) -> None:
    name = replica_group_name("sample", "first", "small")
    before = await serving.get("Deployment", "sample-router")
    del serving.document["spec"]["stages"][0]["variants"][0]
    await serving.apply_profiled()
    await serving.settle()

    assert (await serving.conditions())["PlanApplied"] == ("False", "PlanRejected")
    assert await serving.replicas() == {"small": 1}

    await serving.apply_plan(2)
    await serving.settle()
    after = await serving.get("Deployment", "sample-router")

    assert await serving.replicas() == {"large": 1}
    assert name not in await serving.names("Service") | await serving.names("PodDisruptionBudget")
    assert after["spec"]["template"]["metadata"] != before["spec"]["template"]["metadata"]


async def test_invalid_pipeline_is_reported(serving) -> None:
    """What only our own checks find is a condition; what runs stays."""
    serving.document["spec"]["budget"] = {"cores": "10m"}
    await serving.apply_pipeline()
    await serving.settle()

    assert (await serving.conditions())["Ready"] == ("False", "InvalidSpec")
    assert "budget.cores" in await serving.message("Ready")
    assert "InvalidSpec" in [reason for reason, _ in await serving.events()]
    assert await serving.replicas() == {"small": 1}


async def test_adapter_conditions_are_kept_and_considered(serving) -> None:
    """Ready is the sum of all conditions; each has one writer."""
    condition = {
        "type": "MetricsAvailable",
        "status": "False",
        "reason": "Stale",
        "message": "look at Prometheus",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    metadata = {"name": "sample", "namespace": serving.namespace}
    body = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline", "metadata": metadata}
    await serving.cluster.apply(
        {**body, "status": {"conditions": [condition], "rps": "12"}}, manager="trimtab-adapter", subresource="status"
    )
    await serving.settle()

    assert (await serving.conditions())["Ready"] == ("False", "Stale")
    assert (await serving.conditions())["MetricsAvailable"] == ("False", "Stale")
    assert (await serving.status())["rps"] == "12"


async def test_recreated_pipeline_starts_from_an_empty_state(serving) -> None:
    """Objects of the one before it, not cleared away yet, are not taken for its own."""
    await serving.cluster.delete("InferencePipeline", serving.namespace, "sample")
    await serving.apply_pipeline()
    await serving.look()
    pipeline = await serving.get("InferencePipeline", "sample")
    deployment = await serving.get("Deployment", "sample-router")

    assert {owner["uid"] for owner in deployment["metadata"]["ownerReferences"]} >= {pipeline["metadata"]["uid"]}
