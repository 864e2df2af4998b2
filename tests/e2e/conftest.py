"""Trimtab installed in a real cluster for a test run: chart, namespace, credentials, Prometheus.

The cluster is the node of hack/cluster unless KUBECONFIG names another, whose Services must be reachable from here and
which must have the images of `make images`.
"""

import asyncio
import base64
import json
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest_asyncio
import yaml

from tests.e2e import node
from tests.router.envoy.openssl import Authority, openssl
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.objects import Object
from trimtab_loadtester.clients import Access
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

ROOT = Path(__file__).parents[2]
MANIFESTS = Path(__file__).parent / "manifests"
TOOLS = Path(os.environ.get("TRIMTAB_TOOLS") or node.CACHE / "tools" / "bin")
SYSTEM, NAMESPACE, MANAGER = "trimtab-system", "trimtab-e2e", "e2e"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}
TLS_SECRET, KEYS_SECRET = "trimtab-tls", "trimtab-keys"
LOAD = "load"
"""The client that sends loads."""


class CommandError(Exception):
    """Failure of a program, with the end of its error output."""


async def run(*command: str | Path, stdin: str = "", quiet: bool = True) -> str:
    """Run a program and return its output."""
    pipe = asyncio.subprocess.PIPE
    words = [str(word) for word in command]
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe if quiet else None)
    output, errors = await process.communicate(stdin.encode())
    if process.returncode != 0:
        raise CommandError(f"{' '.join(words)}: {(errors or b'').decode()[-2000:]}")
    return output.decode()


@dataclass(slots=True)
class Credentials:
    """A certificate authority, and the valid API keys by client."""

    authority: Authority
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls) -> Self:
        authority = Authority(Path(tempfile.mkdtemp(prefix="trimtab-credentials-"))).begin()
        return cls(authority, {LOAD: new_key()})

    @property
    def tls(self) -> ssl.SSLContext:
        """Context that trusts this authority only."""
        return ssl.create_default_context(cafile=str(self.authority.file))

    def access(self, client: str = LOAD) -> Access:
        """Files with the key of a client, readable by this user only, and the authority."""
        file = self.authority.folder / f"{client}.key"
        file.touch(mode=0o600)
        file.write_text(self.keys[client])
        return Access(self.authority.file, file)

    async def certificate(self, namespace: str, host: str) -> tuple[Object, str]:
        """Make a certificate for an address; returns the Secret and the certificate's serial number."""
        files = {name: self.authority.folder / name for name in ("tls.crt", "tls.key")}
        await asyncio.to_thread(self.authority.issue, "router", files["tls.crt"], files["tls.key"], f"IP:{host}")
        serial = await asyncio.to_thread(openssl, "x509", "-noout", "-serial", "-in", str(files["tls.crt"]))
        content = {name: file.read_bytes() for name, file in files.items()}
        return _secret(TLS_SECRET, namespace, "kubernetes.io/tls", content), serial.decode().strip().partition("=")[2]

    def hashed(self, namespace: str) -> Object:
        """The Secret of the valid keys, which holds only their hashes."""
        entries = {
            client: format_entry(HashedKey(client, key_digest(key))).encode() for client, key in self.keys.items()
        }
        return _secret(KEYS_SECRET, namespace, "Opaque", entries)


def _secret(name: str, namespace: str, kind: str, content: dict[str, bytes]) -> Object:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata, "data": data}


@dataclass(frozen=True, slots=True)
class Installation:
    """A cluster with Trimtab in it."""

    kubeconfig: Path
    cluster: Cluster
    credentials: Credentials
    is_own_node: bool
    """Whether it is the node of hack/cluster, so that tests may kill its processes."""

    async def kubectl(self, *arguments: str | Path, stdin: str = "") -> str:
        return await run(tool("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments, stdin=stdin)

    async def helm(self, *arguments: str | Path) -> str:
        return await run(tool("helm"), f"--kubeconfig={self.kubeconfig}", *arguments)

    async def address(self, service: str, port: int, namespace: str = NAMESPACE) -> str:
        """HOST:PORT of a Service."""
        found = await self.cluster.get("Service", namespace, service)
        if found is None:
            raise CommandError(f"there is no Service {service} in {namespace}")
        return f"{found['spec']['clusterIP']}:{port}"

    async def apply(self, body: Object) -> Object:
        return await self.cluster.apply(body, manager=MANAGER)

    async def rolled_out(self, deployment: str, namespace: str, seconds: float = 180) -> None:
        """Wait until a Deployment has all its replicas ready."""
        timeout = f"--timeout={seconds:g}s"
        await self.kubectl("rollout", "status", f"deployment/{deployment}", "-n", namespace, timeout)


def tool(name: str) -> str:
    """Path of a program that `hack/cluster/build-tools` builds, or of the system's."""
    path = str(TOOLS / name) if (TOOLS / name).exists() else shutil.which(name)
    if path is None:
        raise CommandError(f"{name} is missing; `hack/cluster/build-tools` builds it")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation() -> AsyncIterator[Installation]:
    """Trimtab in a cluster: what is missing is started, and its namespace is new.

    The namespace is removed at the end; the node of hack/cluster keeps running.
    """
    external = node.given()
    if external is None:
        node.require_node()
    kubeconfig = external or Path((await run(node.SCRIPTS / "up", quiet=False)).strip())
    if external is None:
        await run(node.SCRIPTS / "images", "prometheus", "minio", "control", "model-server", quiet=False)
    async with await Cluster.connect(str(kubeconfig)) as cluster:
        credentials = await asyncio.to_thread(Credentials.make)
        made = Installation(kubeconfig, cluster, credentials, is_own_node=external is None)
        await _make_namespaces(made)
        await _install(made)
        try:
            yield made
        finally:
            shutil.rmtree(credentials.authority.folder, ignore_errors=True)
            await cluster.delete("Namespace", None, NAMESPACE)


async def _make_namespaces(installation: Installation) -> None:
    await installation.cluster.delete("Namespace", None, NAMESPACE)
    await installation.kubectl("wait", "--for=delete", f"namespace/{NAMESPACE}", "--timeout=180s")
    for name in (NAMESPACE, SYSTEM):
        metadata = {"name": name, "labels": RESTRICTED}
        await installation.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    await installation.apply(installation.credentials.hashed(NAMESPACE))


async def _install(installation: Installation) -> None:
    """Install or upgrade the chart; its pods start with the images just built."""
    await installation.kubectl("apply", "-f", MANIFESTS / "prometheus.yaml")
    chart = ROOT / "charts" / "trimtab"
    await installation.helm("upgrade", "--install", "trimtab-crds", chart / "charts" / "trimtab-crds", "-n", SYSTEM)
    await installation.helm("upgrade", "--install", "trimtab", chart, "-n", SYSTEM, *chart_values())
    for name in ("trimtab-operator", "trimtab-adapter"):
        await installation.kubectl("rollout", "restart", f"deployment/{name}", "-n", SYSTEM)
    for name in ("trimtab-operator", "trimtab-adapter", "prometheus"):
        await installation.rolled_out(name, SYSTEM)


def chart_values() -> tuple[str, ...]:
    """The chart's values, as helm's arguments."""
    images = [f"image.{name}.pullPolicy=Never" for name in ("control", "modelServer", "trainer")]
    settings = ["crds.enabled=false", "edge.secure=true", f"prometheus.url=http://prometheus.{SYSTEM}.svc:9090"]
    peers = f"edge.adminPeers={json.dumps([PROMETHEUS])}"
    return (*(part for value in (*settings, *images) for part in ("--set", value)), "--set-json", peers)


def pipeline_document(path: Path) -> dict[str, Any]:
    """A pipeline as the user wrote it, in the namespace of the tests."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    document["metadata"]["namespace"] = NAMESPACE
    return document
