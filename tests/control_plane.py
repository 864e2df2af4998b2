"""Real servers of a control plane for tests: an API server without nodes, started once a session, and Prometheus."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.processes import held_port, running
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.errors import NotFound, Unreachable
from trimtab_kubernetes.kinds import Kind

TOOLS = Path(os.environ.get("TRIMTAB_TOOLS", Path.home() / ".cache" / "trimtab" / "tools" / "bin"))
REQUIRED = os.environ.get("TRIMTAB_REQUIRE_CLUSTER") == "1"
START_SECONDS = 240.0
TOKEN = "administrator-of-tests"


def skip(reason: str) -> None:
    """Skip, saying why; where cluster tests may not be skipped, fail."""
    if REQUIRED:
        pytest.fail(f"TRIMTAB_REQUIRE_CLUSTER=1, but {reason}")
    pytest.skip(reason)


def tool(name: str) -> str:
    """The path of a program; the test is skipped where it is missing."""
    built = TOOLS / name
    found = str(built) if built.exists() else shutil.which(name)
    if found is None:
        skip(f"{name} is missing; `hack/cluster/build-tools` builds it")
    assert found is not None
    return found


@contextmanager
def api_server() -> Iterator[Path]:
    """Start an API server and yield the kubeconfig of its administrator."""
    with control_plane() as running_one:
        yield running_one.kubeconfig


@contextmanager
def control_plane() -> "Iterator[ControlPlane]":
    """Start an API server and its store."""
    programs = tool("etcd"), tool("kube-apiserver")
    with tempfile.TemporaryDirectory(prefix="trimtab-control-plane-") as folder, ExitStack() as held:
        ports = [held.enter_context(held_port()) for _ in range(3)]
        made = ControlPlane(Path(folder), programs, ports)
        held.callback(made.stop)
        made.start()
        yield made


@dataclass
class ControlPlane:
    """An API server and its store, which a test may stop, and restore from a backup."""

    folder: Path
    programs: tuple[str, str]
    ports: Sequence[int]
    """Of the store's clients and peers, and of the API server."""
    _started: ExitStack = field(default_factory=ExitStack)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def stop(self) -> None:
        self._started.close()

    def back_up(self) -> None:
        """Copy the store of a stopped control plane."""
        shutil.copytree(self.folder / "etcd", self.folder / "backup")

    def restore(self) -> None:
        """Replace the store of a stopped control plane by its copy."""
        shutil.rmtree(self.folder / "etcd")
        shutil.copytree(self.folder / "backup", self.folder / "etcd")

    def start(self) -> None:
        folder, started, (client_port, peer_port, port), (etcd, apiserver) = (
            self.folder,
            self._started,
            self.ports,
            self.programs,
        )
        store = f"http://127.0.0.1:{client_port}"
        peer = f"http://127.0.0.1:{peer_port}"
        store_process = _run(
            started,
            folder,
            etcd,
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        key = folder / "service-accounts.key"
        if not key.exists():
            subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        server_process = _run(
            started,
            folder,
            apiserver,
            f"--etcd-servers={store}",
            f"--cert-dir={folder}/certificates",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.97.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
        )
        address = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        write_kubeconfig(folder, address)
        _wait(port, [store_process, server_process], folder)


def _run(started: ExitStack, folder: Path, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return started.enter_context(running([program, *arguments], folder / f"{Path(program).name}.log", folder))


def write_kubeconfig(folder: Path, cluster: dict[str, Any]) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
        "current-context": "tests",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


def _wait(port: int, processes: "list[subprocess.Popen[bytes]]", folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    with httpx.Client(verify=False) as client:  # noqa: S501 - its certificate is made anew at each start
        while True:
            try:
                answer = client.get(f"https://127.0.0.1:{port}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
                if answer.status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            ended = next((process for process in processes if process.poll() is not None), None)
            if ended is not None or time.monotonic() > until:
                log = (folder / "kube-apiserver.log").read_text()[-2000:]
                raise RuntimeError(f"the API server did not come up: {log}")
            time.sleep(0.1)


async def define(cluster: Cluster, *definitions: dict[str, Any]) -> None:
    """Apply them, then return once the API server serves them all."""
    for definition in definitions:
        await cluster.apply(definition, manager="tests")
    for definition in definitions:
        await _established(cluster, definition["metadata"]["name"])
        await _served(cluster, _kind_of(definition["spec"]))


async def _established(cluster: Cluster, name: str) -> None:
    while True:
        listing = await cluster.list("CustomResourceDefinition")
        found = next(item for item in listing.items if item["metadata"]["name"] == name)
        # A definition that is seconds old has null where its conditions will be.
        conditions = (found.get("status") or {}).get("conditions") or ()
        if any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions):
            return
        async for _ in cluster.watch("CustomResourceDefinition", None, None, listing.resource_version):
            break


async def _served(cluster: Cluster, kind: Kind) -> None:
    """Wait until objects of the kind can be listed: a moment after the server says that it is established."""
    async with asyncio.timeout(60):
        while True:
            try:
                await cluster.list(kind)
            except (NotFound, Unreachable):
                await asyncio.sleep(0.05)
            else:
                return


def _kind_of(spec: dict[str, Any]) -> Kind:
    names, version = spec["names"], spec["versions"][0]["name"]
    return Kind(f"{spec['group']}/{version}", names["kind"], names["plural"], spec["scope"] == "Namespaced")


@contextmanager
def prometheus(folder: Path) -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    """Run Prometheus by the folder's prometheus.yml; yield its URL, not ready yet, and its process."""
    own = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with held_port() as port:
        command = [tool("prometheus"), *own, f"--web.listen-address=127.0.0.1:{port}"]
        with running(command, folder / "log") as process:
            yield f"http://127.0.0.1:{port}", process
