"""Stateful stand-in for the Deployment controller, the scheduler and the kubelets, for a cluster without nodes.

It calls the real API server only: it creates and deletes pods as Deployments specify, assigns them to nodes while there
is capacity, and reports them ready unless their image is in `broken_images`.
"""

from dataclasses import dataclass, field
from typing import Any

from trimtab_kubernetes import Cluster
from trimtab_operator.reconciliation.observed_state import DELETION_COST
from trimtab_pipelines.quantity import parse_quantity

MANAGER = "machinery"
_HASH = "7d4b9c"


@dataclass
class Machinery:
    """Plays the cluster's part, one step a call."""

    cluster: Cluster
    namespace: str
    cores: float = 100.0
    node: str = "node"
    """Where new pods run."""
    broken_images: set[str] = field(default_factory=set)
    drains: bool = True
    """Whether deleted pods terminate at once."""
    seldon: bool = False
    """Whether Seldon Core is there: it makes a Deployment of every SeldonDeployment, under a name of its own."""
    made: int = 0

    async def step(self) -> None:
        for found in (await self.cluster.list("SeldonDeployment", self.namespace)).items if self.seldon else []:
            await self._deploy(found)
        deployments = (await self.cluster.list("Deployment", self.namespace)).items
        await self._collect({deployment["metadata"]["uid"] for deployment in deployments})
        for deployment in deployments:
            await self._serve(deployment)

    async def _collect(self, living: set[str]) -> None:
        for pod in (await self.cluster.list("Pod", self.namespace)).items:
            if not living & {owner["uid"] for owner in pod["metadata"].get("ownerReferences", [])}:
                await self.end(pod)

    async def pods(self, deployment: dict[str, Any]) -> list[dict[str, Any]]:
        selector = deployment["spec"]["selector"]["matchLabels"]
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        found = (await self.cluster.list("Pod", self.namespace, labels)).items
        uid = deployment["metadata"]["uid"]
        return [pod for pod in found if uid in {owner["uid"] for owner in pod["metadata"].get("ownerReferences", [])}]

    async def _deploy(self, found: dict[str, Any]) -> None:
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        template = found["spec"]["predictors"][0]["componentSpecs"][0]
        owner = {"apiVersion": found["apiVersion"], "kind": found["kind"], "name": name, "uid": uid}
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": f"{name}-default-0-{template['spec']['containers'][0]['name']}",
                "namespace": self.namespace,
                "labels": template["metadata"]["labels"],
                "ownerReferences": [owner],
            },
            "spec": {
                "replicas": found["spec"]["replicas"],
                "selector": {"matchLabels": template["metadata"]["labels"]},
                "template": template,
            },
        }
        await self.cluster.apply(deployment, manager=MANAGER)

    async def _serve(self, deployment: dict[str, Any]) -> None:
        pods = [pod for pod in await self.pods(deployment) if "deletionTimestamp" not in pod["metadata"]]
        for pod in sorted(pods, key=_deletion_cost, reverse=True)[deployment["spec"]["replicas"] :]:
            await self.end(pod)
        for _ in range(deployment["spec"]["replicas"] - len(pods)):
            await self._make(deployment)
        pods = [pod for pod in await self.pods(deployment) if "deletionTimestamp" not in pod["metadata"]]
        ready = [await self._report(pod) for pod in pods]
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(pods),
            "readyReplicas": sum(ready),
        }
        await self._apply_status(deployment, status)

    async def _make(self, deployment: dict[str, Any]) -> None:
        self.made += 1
        template = deployment["spec"]["template"]
        name = f"{deployment['metadata']['name']}-{self.made}"
        labels = template["metadata"]["labels"] | {"pod-template-hash": _HASH}
        owner = {"name": f"{deployment['metadata']['name']}-{_HASH}", "uid": deployment["metadata"]["uid"]}
        owners = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True, **owner}]
        metadata = {"name": name, "namespace": self.namespace, "labels": labels, "ownerReferences": owners}
        spec = dict(template["spec"])
        if await self._has_room(spec):
            spec["nodeName"] = self.node
        await self.cluster.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, manager=MANAGER
        )

    async def _has_room(self, spec: dict[str, Any]) -> bool:
        pods = (await self.cluster.list("Pod", self.namespace)).items
        taken = sum(_cores(pod["spec"]) for pod in pods if pod["spec"].get("nodeName"))
        return taken + _cores(spec) <= self.cores + 1e-9

    async def end(self, pod: dict[str, Any]) -> None:
        """Delete a pod; with `drains` its end is reported at once too."""
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        grace = 0 if self.drains else 600
        await self.cluster.call("DELETE", path, None, {"gracePeriodSeconds": grace})

    async def _report(self, pod: dict[str, Any]) -> bool:
        image = pod["spec"]["containers"][0]["image"]
        scheduled, broken = bool(pod["spec"].get("nodeName")), image in self.broken_images
        ready = scheduled and not broken
        conditions = [_condition("Ready", ready), _condition("PodScheduled", scheduled, "Unschedulable")]
        status: dict[str, Any] = {"phase": "Running" if ready else "Pending", "conditions": conditions}
        if scheduled and broken:
            waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
            name = pod["spec"]["containers"][0]["name"]
            status["containerStatuses"] = [
                {"name": name, "image": image, "imageID": "", "ready": False, "restartCount": 0, **waiting}
            ]
        await self._apply_status(pod, status)
        return ready

    async def _apply_status(self, found: dict[str, Any], status: dict[str, Any]) -> None:
        body = {
            "apiVersion": found["apiVersion"],
            "kind": found["kind"],
            "metadata": {"name": found["metadata"]["name"], "namespace": self.namespace},
            "status": status,
        }
        await self.cluster.apply(body, manager=MANAGER, subresource="status")


def _condition(kind: str, holds: object, reason: str = "") -> dict[str, Any]:
    condition = {"type": kind, "status": "True" if holds else "False"}
    return condition | ({"reason": reason, "message": "0/1 nodes are available"} if reason and not holds else {})


def _deletion_cost(pod: dict[str, Any]) -> int:
    return int(pod["metadata"].get("annotations", {}).get(DELETION_COST, 0))


def _cores(spec: dict[str, Any]) -> float:
    requests = spec["containers"][0].get("resources", {}).get("requests", {})
    return parse_quantity(requests.get("cpu", 0))
