"""A pod of another namespace that has no key tries the door, the admin port and the model servers.

Whether the network enforces policies at all is tried first, at a pod whose policy lets nobody in.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.observing import Watched, is_ready, until
from benchmarks.cluster.setting import STRICT, Setting
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import resources, security_of_container, security_of_pod
from trimtab_pipelines.kubernetes_names import DATA_PORT, ROUTER_ADMIN_PORT, ROUTER_GRPC_PORT, ROUTER_REST_PORT

ELSEWHERE, TRESPASSER, GUARDED = "trimtab-e2e-elsewhere", "trespasser", "guarded"
GUARDED_PORT = 8000
PATIENCE_SECONDS = 120.0
MEMORY_BYTES = 128 * 2**20
LETS_IN = frozenset({"200", "OK"})
IMAGE = "localhost/trimtab-control:dev"
CONNECTS = f"import socket; socket.create_connection(('localhost', {GUARDED_PORT}))"


@dataclass(frozen=True, slots=True)
class Met:
    """What it met: by way of asking the answer, and the ports that took its connection."""

    answers: Mapping[str, str]
    reached: frozenset[str]

    @property
    def enforced(self) -> bool:
        """Whether the network keeps anybody from anything."""
        return GUARDED not in self.reached

    @property
    def let_in(self) -> tuple[str, ...]:
        """How it was served although it has no credential."""
        return tuple(how for how, answer in self.answers.items() if answer in LETS_IN)

    @property
    def forbidden(self) -> frozenset[str]:
        """The pipeline's own ports that it reached and should not have."""
        return self.reached - {GUARDED}


async def trespassed(watched: Watched) -> Met:
    """Let it try, in a namespace that is there for it alone."""
    setting = watched.setting
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ELSEWHERE, "labels": STRICT}}
    await setting.kubectl("wait", "--for=delete", f"namespace/{ELSEWHERE}", "--timeout=60s")
    await setting.apply(body)
    try:
        guarded = await _guarded(setting)
        return await _tried(watched, guarded)
    finally:
        await setting.cluster.delete("Namespace", None, ELSEWHERE)


async def _guarded(setting: Setting) -> str:
    """Start a pod that nobody may connect to; return its address."""
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec}
    await setting.apply(policy | {"metadata": {"name": GUARDED, "namespace": ELSEWHERE}})
    command = ["python", "-m", "http.server", str(GUARDED_PORT), "--directory", "/etc"]
    listens = {"exec": {"command": ["python", "-c", CONNECTS]}, "periodSeconds": 1, "timeoutSeconds": 5}
    await setting.apply(_pod(GUARDED, command, readinessProbe=listens))

    async def up() -> str | None:
        found = await setting.cluster.get("Pod", ELSEWHERE, GUARDED)
        return str(found["status"]["podIP"]) if found is not None and is_ready(found) else None

    return str(await until(up, f"pod {GUARDED}", PATIENCE_SECONDS))


async def _tried(watched: Watched, guarded: str) -> Met:
    setting = watched.setting
    script = Path(__file__).with_name("trespasser.py").read_text()
    await setting.apply(_pod(TRESPASSER, ["python", "-c", script, json.dumps(await _ways(watched, guarded))]))

    async def ended() -> str | None:
        found = await setting.cluster.get("Pod", ELSEWHERE, TRESPASSER)
        phase = str(((found or {}).get("status") or {}).get("phase"))
        return phase if phase in {"Succeeded", "Failed"} else None

    await until(ended, f"the end of pod {TRESPASSER}", PATIENCE_SECONDS)
    said = await setting.kubectl("logs", TRESPASSER, "-n", ELSEWHERE)
    try:
        found = json.loads(said.strip().rpartition("\n")[2])
    except ValueError:
        raise RuntimeError(f"pod {TRESPASSER}: {said}") from None
    return Met(found["answers"], frozenset(name for name, reached in found["reached"].items() if reached))


async def _ways(watched: Watched, guarded: str) -> Object:
    """Where it should try: the door by its Service, all other ports at the pods themselves."""
    ports: dict[str, tuple[str, int]] = {GUARDED: (guarded, GUARDED_PORT)}
    for component, port in (("router", ROUTER_ADMIN_PORT), ("model-server", DATA_PORT)):
        for pod in await watched.pods(component):
            with suppress(KeyError):
                ports[f"{pod['metadata']['name']}:{port}"] = (pod["status"]["podIP"], port)
    return {
        "host": watched.address.rpartition(":")[0],
        "rest": ROUTER_REST_PORT,
        "grpc": ROUTER_GRPC_PORT,
        "path": f"/v2/models/{watched.name}",
        "authority": watched.setting.credentials.authority.file.read_text(),
        "ports": ports,
    }


def _pod(name: str, command: list[str], **container: object) -> Object:
    only = {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "resources": resources(0.02, MEMORY_BYTES),
        "securityContext": security_of_container(),
        **container,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": ELSEWHERE},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": security_of_pod(),
            "containers": [only],
        },
    }
