"""Access of a pod of another namespace, without a key, to a pipeline's proxy, admin port and model servers.

A pod whose policy admits no connection shows first whether the cluster's network enforces policies at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import RESTRICTED, Installation
from tests.e2e.load import restricted_pod
from tests.e2e.observed import ObservedPipeline, is_ready, until
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import resources
from trimtab_pipelines.kubernetes_names import DATA_PORT, ROUTER_ADMIN_PORT, ROUTER_GRPC_PORT, ROUTER_REST_PORT

ELSEWHERE, INTRUDER, ISOLATED = "trimtab-e2e-elsewhere", "intruder", "isolated"
ISOLATED_PORT = 8000
PATIENCE_SECONDS = 120.0
MEMORY_BYTES = 128 * 2**20
CONNECTS = f"import socket; socket.create_connection(('localhost', {ISOLATED_PORT}))"


@dataclass(frozen=True, slots=True)
class Access:
    """Responses by kind of request, and the ports that accepted a connection."""

    responses: Mapping[str, str]
    reached: frozenset[str]

    @property
    def are_policies_enforced(self) -> bool:
        return ISOLATED not in self.reached

    @property
    def admitted(self) -> list[str]:
        """Requests that were served without a credential."""
        return [name for name, response in self.responses.items() if response in {"200", "OK"}]


async def access_from_elsewhere(pipeline: ObservedPipeline) -> Access:
    """Let a pod try, in a namespace of its own."""
    installation = pipeline.installation
    metadata = {"name": ELSEWHERE, "labels": RESTRICTED}
    await installation.kubectl("wait", "--for=delete", f"namespace/{ELSEWHERE}", "--timeout=60s")
    await installation.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        isolated = await _start_isolated_pod(installation)
        return await _try(pipeline, isolated)
    finally:
        await installation.cluster.delete("Namespace", None, ELSEWHERE)


async def _start_isolated_pod(installation: Installation) -> str:
    """Start a pod whose policy admits no connection; returns its address."""
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []}
    metadata = {"name": ISOLATED, "namespace": ELSEWHERE}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
    await installation.apply(policy)
    command = ["python", "-m", "http.server", str(ISOLATED_PORT), "--directory", "/etc"]
    listens = {"exec": {"command": ["python", "-c", CONNECTS]}, "periodSeconds": 1, "timeoutSeconds": 5}
    await installation.apply(_pod(ISOLATED, command, readinessProbe=listens))

    async def address() -> str | None:
        pod = await installation.cluster.get("Pod", ELSEWHERE, ISOLATED)
        return str(pod["status"]["podIP"]) if pod is not None and is_ready(pod) else None

    return await until(address, f"pod {ISOLATED}", PATIENCE_SECONDS)


async def _try(pipeline: ObservedPipeline, isolated: str) -> Access:
    installation, script = pipeline.installation, Path(__file__).with_name("intruder_pod.py").read_text()
    order = json.dumps(await _addresses(pipeline, isolated))
    await installation.apply(_pod(INTRUDER, ["python", "-c", script, order]))

    async def has_ended() -> bool:
        pod = await installation.cluster.get("Pod", ELSEWHERE, INTRUDER) or {}
        return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}

    await until(has_ended, f"the end of pod {INTRUDER}", PATIENCE_SECONDS)
    log = await installation.kubectl("logs", INTRUDER, "-n", ELSEWHERE)
    found = json.loads(log.strip().rpartition("\n")[2])
    return Access(found["responses"], frozenset(name for name, reached in found["reached"].items() if reached))


async def _addresses(pipeline: ObservedPipeline, isolated: str) -> Object:
    """The proxy by its Service, all other ports by the pods' addresses."""
    ports: dict[str, tuple[str, int]] = {ISOLATED: (isolated, ISOLATED_PORT)}
    for component, port in (("router", ROUTER_ADMIN_PORT), ("model-server", DATA_PORT)):
        for pod in await pipeline.pods(component):
            if address := pod["status"].get("podIP"):
                ports[f"{pod['metadata']['name']}:{port}"] = (address, port)
    return {
        "host": pipeline.address.rpartition(":")[0],
        "rest": ROUTER_REST_PORT,
        "grpc": ROUTER_GRPC_PORT,
        "path": f"/v2/models/{pipeline.name}",
        "authority": pipeline.installation.credentials.authority.file.read_text(),
        "ports": ports,
    }


def _pod(name: str, command: list[str], **container: object) -> Object:
    program: Object = {"name": name, "image": "localhost/trimtab-control:dev", "command": command}
    program |= {"resources": resources(0.02, MEMORY_BYTES), **container}
    return restricted_pod({"name": name, "namespace": ELSEWHERE}, program, restartPolicy="Never")
