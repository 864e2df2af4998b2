"""Scene of operator, pipeline and fake cluster controllers, advanced one step at a time."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.builders import a_body, a_pipeline_document, a_plan, a_point_profile, a_profile, a_stage, a_variant
from tests.operator_.fake_controllers import Machinery
from trimtab_kubernetes import Cluster
from trimtab_operator.controller import Controller
from trimtab_operator.metrics import Metrics
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import (
    ADAPTER_MANAGER,
    OPERATOR_MANAGER,
    PROFILER_MANAGER,
    REPLICA_GROUP_LABEL,
    profile_name,
    router_name,
)
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, profile_tasks
from trimtab_pipelines.spec import InferencePipeline

SETTINGS = Settings(control_image="control:1", model_server_image="model-server:1")


def owned(pipeline: InferencePipeline) -> InferencePipeline:
    """A pipeline as the API server stores it in namespace team."""
    return pipeline.with_metadata(namespace="team", uid="1234", generation=1)


@dataclass
class Site:
    """One pipeline in a namespace of its own."""

    cluster: Cluster
    namespace: str
    document: dict[str, Any]
    ahead_seconds: float = 0.0
    """How far the operator's clock, which stands still, is ahead of the cluster's at the start.

    The cluster's goes on: what is to be later than it by some time is so by two minutes more.
    """
    started: float = field(default_factory=time.time)
    settings: Settings = SETTINGS
    controller: Controller = field(init=False)
    machinery: Machinery = field(init=False)

    def __post_init__(self) -> None:
        self.machinery = Machinery(self.cluster, self.namespace)
        self.document["metadata"]["namespace"] = self.namespace
        self.restart()

    def restart(self, cluster: Any = None) -> None:
        self.controller = Controller(cluster or self.cluster, self.settings, Metrics(), self.now)

    def now(self) -> float:
        return self.started + self.ahead_seconds

    @property
    def pipeline(self) -> InferencePipeline:
        return InferencePipeline.model_validate(self.document)

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    async def apply_pipeline(self) -> None:
        await self.cluster.apply(self.document, manager="user")

    async def apply_profiles(self) -> None:
        for task in profile_tasks(self.pipeline):
            for stage, variants in task.variants_by_stage.items():
                points = [a_point_profile(variant) for variant in variants]
                name, marks = (
                    profile_name(self.name, stage, task.accelerator),
                    {FINGERPRINT_ANNOTATION: task.fingerprint},
                )
                profile = a_body(a_profile(stage, points, self.name), name, self.namespace, annotations=marks)
                await self.cluster.apply(profile, manager=PROFILER_MANAGER)

    async def apply_plan(self, generation: int = 1, **changes: Any) -> None:
        """Write a plan as the adapter would; `changes` apply to every stage."""
        plan = a_body(a_plan(self.pipeline, generation, **changes), namespace=self.namespace)
        plan["spec"]["explanation"] = {"change": f"why plan {generation}"}
        await self.cluster.apply(plan, manager=ADAPTER_MANAGER)

    async def apply_profiled(self) -> None:
        await self.apply_pipeline()
        await self.apply_profiles()

    async def serve(self) -> None:
        await self.apply_profiled()
        await self.apply_plan(1)
        await self.settle()

    async def look(self) -> int:
        """Let the operator see everything and act until it has nothing more to write; return the writes of it all."""
        key, writes = (self.namespace, self.name), 0
        for _ in range(20):
            await self.controller.resync()
            outcome = await self.controller.reconcile(key)
            writes += outcome.writes
            if not outcome.writes:
                return writes
        raise AssertionError("the operator never comes to rest")

    async def settle(self) -> None:
        """Let operator and cluster work until neither changes anything."""
        for _ in range(30):
            writes = await self.look()
            await self.machinery.step()
            if not writes and not await self.look():
                return
        raise AssertionError("operator and cluster never come to rest")

    async def get(self, kind: str, name: str) -> dict[str, Any]:
        found = await self.cluster.get(kind, self.namespace, name)
        assert found is not None, f"{kind} {name}"
        return found

    async def status(self) -> dict[str, Any]:
        return dict((await self.get("InferencePipeline", self.name)).get("status", {}))

    async def conditions(self) -> dict[str, tuple[str, str]]:
        return {c["type"]: (c["status"], c["reason"]) for c in (await self.status()).get("conditions", [])}

    async def message(self, kind: str) -> str:
        return next(str(c["message"]) for c in (await self.status())["conditions"] if c["type"] == kind)

    async def replicas(self, by: str = REPLICA_GROUP_LABEL) -> dict[str, int]:
        found = (await self.cluster.list("Deployment", self.namespace)).items
        labelled = [(each["metadata"].get("labels", {}), each["spec"]["replicas"]) for each in found]
        return {labels[by]: replicas for labels, replicas in labelled if REPLICA_GROUP_LABEL in labels}

    async def good_plan(self) -> int | None:
        written = (await self.get("ConfigMap", router_name(self.name)))["data"].get("plan.json")
        return None if written is None else int(json.loads(written)["spec"]["generation"])

    async def names(self, kind: str) -> set[str]:
        return {item["metadata"]["name"] for item in (await self.cluster.list(kind, self.namespace)).items}

    async def events(self) -> list[tuple[str, str]]:
        return sorted((event["reason"], event["message"]) for event in await self.operator_events())

    async def operator_events(self) -> list[dict[str, Any]]:
        """The operator's Events, without those of the API server itself."""
        found = (await self.cluster.list("Event", self.namespace)).items
        return [event for event in found if event.get("source", {}).get("component") == OPERATOR_MANAGER]

    async def versions(self) -> dict[str, str]:
        found = list(await self.operator_events())
        for kind in ("InferencePipeline", "PipelinePlan", "Deployment", "Service", "ConfigMap", "RoleBinding"):
            found += (await self.cluster.list(kind, self.namespace)).items
        return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in found}


@pytest.fixture
def site(cluster: Cluster, namespace: str) -> Site:
    """A pipeline of one stage with two variants, each hosted by itself."""
    variants = [a_variant("small"), a_variant("large", accuracy=0.95)]
    return Site(cluster, namespace, a_pipeline_document([a_stage(variants=variants, variantPlacement="Dedicated")]))
