"""Real node for tests: the one of hack/cluster, or the cluster that KUBECONFIG names; tests skip without either."""

import os
import subprocess
from pathlib import Path

from tests import control_plane

SCRIPTS = Path(__file__).parents[2] / "hack" / "cluster"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"
STATE = Path(os.environ.get("TRIMTAB_CLUSTER") or CACHE / "cluster")
RUNTIME = Path("/run/trimtab-cluster")
PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"),
    *("coredns", "minio", "containerd", "runc", "etcd", "buildah"),
)


def given() -> Path | None:
    """Kubeconfig of an external cluster."""
    named = os.environ.get("TRIMTAB_TEST_KUBECONFIG") or os.environ.get("KUBECONFIG")
    return Path(named) if named and Path(named) != STATE / "kubeconfig" else None


def require_node() -> None:
    """Skip where no node can be brought up here."""
    if os.geteuid() != 0:
        control_plane.skip("a node needs root: it starts containerd and a kubelet")
    for program in PROGRAMS:
        control_plane.tool(program)


def script(name: str, *arguments: str) -> str:
    """Run one of hack/cluster's scripts and return what it printed."""
    command = [str(SCRIPTS / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert ended.returncode == 0, f"{name}: {ended.stderr[-3000:]}"
    return ended.stdout.strip()


def running() -> bool:
    """Whether a node is already running."""
    return (RUNTIME / "containerd.sock").exists() and bool(processes())


def processes() -> list[str]:
    """Command lines of the cluster's processes, those in its pods included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            program = (folder / "exe").readlink().name
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            groups = (folder / "cgroup").read_text()
        except OSError:
            continue  # ended meanwhile, or a thread of the kernel's
        daemon = program.startswith(("etcd", "kube", "coredns", "containerd")) and program != "kubectl"
        if "/trimtab-cluster" in groups or (daemon and (f"{STATE}/" in words or f"{RUNTIME}/" in words)):
            found.append(words)
    return found


def leftovers() -> list[str]:
    """Whatever of a cluster is on this machine."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    found = [f"process {words}" for words in processes()]
    found += [f"mount {where}" for where in mounts if where.startswith((f"{STATE}/", f"{RUNTIME}/"))]
    found += [f"network {link.name}" for link in Path("/sys/class/net").iterdir() if link.name == "trimtab0"]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True, timeout=10).stdout
    found += [f"rules {table}" for table in tables.splitlines() if "kube-proxy" in table]
    found += [f"group {folder}" for folder in Path("/sys/fs/cgroup").glob("**/trimtab-cluster")]
    return found
