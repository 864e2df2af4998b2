"""Everything a run in a cluster needs: node, images, chart, a strict namespace, a Prometheus.

The node is hack/cluster's unless KUBECONFIG names another; its Services must then be reachable from here, and the
images of `make images` be there.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.cluster.credentials import Credentials
from trimtab_kubernetes import Cluster

ROOT = Path(__file__).parents[2]
MANIFESTS = Path(__file__).parent / "manifests"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"
TOOLS = Path(os.environ.get("TRIMTAB_TOOLS") or CACHE / "tools" / "bin")
SYSTEM, NAMESPACE, MANAGER = "trimtab-system", "trimtab-e2e", "benchmark"
STRICT = {"pod-security.kubernetes.io/enforce": "restricted"}
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}
POLL_SECONDS = 0.1
console = Console(stderr=True)


class CommandError(Exception):
    """A program that ended badly; the message is what it said last."""


async def run(*command: str | Path, given: str | None = None, quiet: bool = True) -> str:
    """Run a program and return what it printed; raise CommandError with its complaint."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if quiet else None,
    )
    out, errors = await process.communicate((given or "").encode())
    if process.returncode != 0:
        raise CommandError(f"{' '.join(map(str, command))}: {(errors or b'').decode()[-2000:]}")
    return out.decode()


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster with Trimtab in it."""

    kubeconfig: Path
    cluster: Cluster
    namespace: str
    ours: bool
    """It is hack/cluster's node, so that its processes may be broken."""
    credentials: Credentials

    async def kubectl(self, *arguments: str | Path, given: str | None = None) -> str:
        """Run kubectl as administrator."""
        return await run(tool("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments, given=given)

    async def helm(self, *arguments: str | Path) -> str:
        """Run helm as administrator."""
        return await run(tool("helm"), f"--kubeconfig={self.kubeconfig}", *arguments)

    async def address(self, namespace: str, service: str, port: int) -> str:
        """Host:port of a Service."""
        found = await self.cluster.get("Service", namespace, service)
        if found is None:
            raise CommandError(f"there is no Service {service} in {namespace}")
        return f"{found['spec']['clusterIP']}:{port}"

    async def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Apply an object as the user would."""
        return await self.cluster.apply(body, manager=MANAGER)

    async def apply_file(self, name: str, namespace: str) -> None:
        """Apply all documents of one of our manifests to a namespace."""
        await self.kubectl("apply", "-n", namespace, "-f", MANIFESTS / name)

    async def rolled_out(self, deployment: str, namespace: str, seconds: float = 180) -> None:
        """Wait until a Deployment has all its replicas ready."""
        waiting = ("rollout", "status", f"deployment/{deployment}", "-n", namespace, f"--timeout={seconds:g}s")
        await self.kubectl(*waiting)


def tool(name: str) -> str:
    """The path of a program that `hack/cluster/build-tools` builds, or of the system's."""
    built = TOOLS / name
    found = str(built) if built.exists() else shutil.which(name)
    if found is None:
        raise CommandError(f"{name} is missing; `hack/cluster/build-tools` builds it")
    return found


@asynccontextmanager
async def prepared(*, build: bool = True) -> AsyncIterator[Setting]:
    """Bring up what is missing and install the chart; the namespace is made anew, and removed in the end."""
    given = os.environ.get("KUBECONFIG")
    own = CACHE / "cluster" if "TRIMTAB_CLUSTER" not in os.environ else Path(os.environ["TRIMTAB_CLUSTER"])
    ours = given is None or Path(given) == own / "kubeconfig"
    kubeconfig = Path(given) if given else own / "kubeconfig"
    if ours:
        console.print("node")
        kubeconfig = Path((await run(ROOT / "hack" / "cluster" / "up", quiet=False)).strip())
    if ours and build:
        await run(ROOT / "hack" / "cluster" / "images", "prometheus", "minio", "control", "model-server", quiet=False)
    async with await Cluster.connect(str(kubeconfig)) as cluster:
        setting = Setting(kubeconfig, cluster, NAMESPACE, ours, await Credentials.make())
        await _fresh_namespace(setting)
        await _install(setting)
        try:
            yield setting
        finally:
            shutil.rmtree(setting.credentials.authority.folder, ignore_errors=True)
            await cluster.delete("Namespace", None, NAMESPACE)


async def _fresh_namespace(setting: Setting) -> None:
    await setting.cluster.delete("Namespace", None, setting.namespace)
    gone = ("wait", "--for=delete", f"namespace/{setting.namespace}", "--timeout=180s")
    await setting.kubectl(*gone)
    for name in (setting.namespace, SYSTEM):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": STRICT}}
        await setting.apply(body)
    await setting.apply(setting.credentials.hashed(setting.namespace))


async def _install(setting: Setting) -> None:
    """Install the chart, or bring an earlier install up to date; its pods start anew with the images just built."""
    console.print("helm")
    await setting.kubectl("apply", "-f", MANIFESTS / "prometheus.yaml")
    chart = ROOT / "charts" / "trimtab"
    await setting.helm("upgrade", "--install", "trimtab-crds", chart / "charts" / "trimtab-crds", "-n", SYSTEM)
    await setting.helm("upgrade", "--install", "trimtab", chart, "-n", SYSTEM, *values())
    for name in ("trimtab-operator", "trimtab-adapter"):
        await setting.kubectl("rollout", "restart", f"deployment/{name}", "-n", SYSTEM)
    for name in ("trimtab-operator", "trimtab-adapter", "prometheus"):
        await setting.rolled_out(name, SYSTEM)


def values() -> tuple[str, ...]:
    """The chart's values for a run, as helm's arguments."""
    images = [f"image.{name}.pullPolicy=Never" for name in ("control", "modelServer", "trainer")]
    settings = [
        "crds.enabled=false",
        "edge.secure=true",
        f"prometheus.url=http://prometheus.{SYSTEM}.svc:9090",
        *images,
    ]
    peers = f"edge.adminPeers={json.dumps([PROMETHEUS])}"
    return (*(part for setting in settings for part in ("--set", setting)), "--set-json", peers)


def pipeline_document(path: Path, namespace: str) -> dict[str, Any]:
    """Read a pipeline as the user wrote it, into a namespace."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    document["metadata"]["namespace"] = namespace
    return document
