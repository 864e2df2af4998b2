"""Nodes without machines: KWOK plays their kubelets, `Autoscaler` adds and removes them, `Replicas` are their pods."""

import asyncio
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

from tests.control_plane import ControlPlane, tool
from tests.e2e.observed import conditions, is_ready
from tests.processes import own_address, running
from trimtab_kubernetes import Cluster, list_and_watch
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import Key, Object
from trimtab_operator.manifests.objects import MODEL_SERVER
from trimtab_operator.manifests.pod_spec import ZONE
from trimtab_pipelines.kubernetes_names import COMPONENT, FLAVOR_LABEL, FLAVORS_VARIABLE

STAGES = Path(__file__).parent / "manifests" / "kwok.yaml"
CONTROLLERS = (
    *("deployment-controller", "replicaset-controller", "endpointslice-controller"),
    *("node-lifecycle-controller", "pod-garbage-collector-controller"),
)
KIND, MANAGER = "node-kind", "cluster-autoscaler"
"""Label of a node's flavor, and the writer of nodes."""
SCAN_SECONDS = 10.0
"""Interval at which Cluster Autoscaler looks for pods that no node has room for."""
FEW_CORES = 0.9
"""Of each node, beside its replicas; for routers."""


@contextmanager
def workload_controllers(plane: ControlPlane) -> Iterator[None]:
    """Run the scheduler and the controllers that make pods of Deployments; no node fails because it is silent."""
    shared = [f"--kubeconfig={plane.kubeconfig}", "--leader-elect=false", "--profiling=false", "--secure-port=0"]
    shared += ["--kube-api-qps=300", "--kube-api-burst=600"]
    own = [f"--controllers={','.join(CONTROLLERS)}", "--node-monitor-grace-period=1h"]
    with ExitStack() as started:
        for program, arguments in (("kube-controller-manager", own), ("kube-scheduler", [])):
            command = [tool(program), *shared, *arguments]
            started.enter_context(running(command, plane.folder / f"{program}.log", plane.folder))
        yield


@contextmanager
def kwok(plane: ControlPlane) -> Iterator[None]:
    """Play the kubelets of all nodes."""
    config = plane.folder / "kwok.yaml"
    config.write_text(STAGES.read_text().replace("ROUTER_ADDRESS", own_address()))
    options = ("--manage-all-nodes=true", "--node-lease-duration-seconds=0", "--cidr=10.248.0.1/16")
    command = [tool("kwok"), f"--kubeconfig={plane.kubeconfig}", f"--config={config}", *options]
    with running(command, plane.folder / "kwok.log", plane.folder):
        yield


@contextmanager
def trimtab(plane: ControlPlane, namespace: str, flavors: str) -> Iterator[None]:
    """Run operator and adapter for one namespace, as processes; the flavors are JSON, as the chart passes them."""
    own = {"KUBECONFIG": str(plane.kubeconfig), "POD_NAMESPACE": namespace, FLAVORS_VARIABLE: flavors}
    own |= {"TRIMTAB_NAMESPACES": namespace, "TRIMTAB_WATCH_NODES": "true"}
    own |= {"TRIMTAB_HEALTH_PORT": "0", "TRIMTAB_METRICS_PORT": "0"}
    commands = {
        "operator": ["trimtab_operator"],
        "adapter": ["trimtab_adapter", "--cluster", f"--namespaces={namespace}", "--health-port=0", "--metrics-port=0"],
    }
    with ExitStack() as started:
        for name, words in commands.items():
            command = [sys.executable, "-m", *words]
            started.enter_context(running(command, plane.folder / f"{name}.log", environment={**environ, **own}))
        yield


@dataclass(slots=True)
class NodePool:
    """Nodes of one flavor that an autoscaler adds and removes."""

    flavor: str
    replicas: int
    """Replicas that fit on a node."""
    startup_seconds: float
    zones: list[str]
    device: str = ""
    """Extended resource of which each replica requests one."""
    made: int = 0
    coming: int = 0
    """Nodes that were requested and whose pods may not be scheduled yet."""

    def next_node(self) -> Object:
        """A node in the next zone; those with devices admit only pods that tolerate them."""
        zone, name = self.zones[self.made % len(self.zones)], f"{self.flavor}-{self.made}"
        self.made += 1
        amounts = {"cpu": f"{self.replicas + FEW_CORES:g}", "memory": "1Ti", "pods": "110"}
        devices = {self.device: str(self.replicas)} if self.device else {}
        taints = [{"key": self.device, "effect": "NoSchedule"}] if self.device else []
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {KIND: self.flavor, ZONE: zone, "kubernetes.io/hostname": name}},
            "spec": {"taints": taints},
            "status": {"capacity": amounts | devices, "allocatable": amounts | devices},
        }


@dataclass(slots=True)
class Replicas:
    """Pods of model servers as one watch shows them, and how many of each flavor served over time."""

    cluster: Cluster
    namespace: str
    pods: dict[Key, Object] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Nodes that no longer exist. The API server shows their pods as ready until they are garbage-collected."""
    serving: Counter[str] = field(default_factory=Counter)
    timeline: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """By flavor: Unix times, and the replicas that served from then on."""
    _serves: set[Key] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self) -> None:
        async for change in list_and_watch(self.cluster, "Pod", self.namespace, f"{COMPONENT}={MODEL_SERVER}"):
            if change.object is not None:
                self._take(change.key, change.object, deleted=change.deleted)

    def lose(self, nodes: set[str]) -> int:
        """Nodes are gone; return how many replicas served on them until now."""
        self.gone |= nodes
        lost = [key for key in self._serves if node_of(self.pods[key]) in nodes]
        for key in lost:
            self._take(key, self.pods[key])
        return len(lost)

    def on(self, nodes: set[str]) -> int:
        """How many replicas serve on nodes."""
        return sum(node_of(self.pods[key]) in nodes for key in self._serves)

    def pending(self, flavor: str) -> list[Object]:
        """Pods of a flavor that no node has room for."""
        return [pod for pod in self.pods.values() if _waits(pod) and pod["metadata"]["labels"][FLAVOR_LABEL] == flavor]

    async def until(self, holds: Callable[[], bool], what: str, seconds: float) -> float:
        """Wait until a condition of the pods holds; return the seconds it took."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not come within {seconds:g} s; {dict(self.serving)} serve") from None
        return time.monotonic() - begun

    def _take(self, key: Key, pod: Object, *, deleted: bool = False) -> None:
        serves = not deleted and is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        serves = serves and node_of(pod) not in self.gone
        if deleted:
            self.pods.pop(key, None)
        else:
            self.pods[key] = pod
        if serves != (key in self._serves):
            flavor = pod["metadata"]["labels"][FLAVOR_LABEL]
            self.serving[flavor] += 1 if serves else -1
            (self._serves.add if serves else self._serves.discard)(key)
            self.timeline[flavor].append((time.time(), self.serving[flavor]))
        self._changed.set()


def node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName", ""))


def _waits(pod: Object) -> bool:
    return conditions(pod).get("PodScheduled", {}).get("reason") == "Unschedulable"


@dataclass(slots=True)
class Autoscaler:
    """Adds nodes for pods that wait for one, as Cluster Autoscaler does, after the startup time of their flavor."""

    cluster: Cluster
    replicas: Replicas
    pools: Mapping[str, NodePool]
    """By flavor."""
    nodes: dict[str, Object] = field(default_factory=dict)
    _notified: set[str] = field(default_factory=set)
    """Uids of pods that have an Event."""

    async def add(self, flavor: str, count: int = 1) -> None:
        made = [self.pools[flavor].next_node() for _ in range(count)]
        await asyncio.gather(*(self.cluster.create(node, manager=MANAGER) for node in made))
        self.nodes |= {node["metadata"]["name"]: node for node in made}

    async def remove(self, names: Sequence[str]) -> int:
        """Take machines and nodes away without notice; return how many replicas served on them until now."""
        served = self.replicas.lose(set(names))
        await asyncio.gather(*(self.cluster.delete("Node", None, name) for name in names))
        for name in names:
            del self.nodes[name]
        return served

    async def taint(self, names: Sequence[str], key: str) -> None:
        bodies = [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            | {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}
            for name in names
        ]
        await asyncio.gather(*(self.cluster.apply(body, manager="node-termination-handler") for body in bodies))

    def named(self, label: str, value: str) -> list[str]:
        """Names of the nodes with a label."""
        return [name for name, node in self.nodes.items() if node["metadata"]["labels"][label] == value]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as starting:
            while True:
                for pool in self.pools.values():
                    pending = self.replicas.pending(pool.flavor)
                    count = max(math.ceil(len(pending) / pool.replicas) - pool.coming, 0)
                    pool.coming += count
                    for _ in range(count):
                        starting.create_task(self._start(pool))
                    if count:
                        await self._write_events(pool, pending, count)
                await asyncio.sleep(SCAN_SECONDS)

    async def _start(self, pool: NodePool) -> None:
        """Start a node, which counts as on its way until its pods are scheduled."""
        await asyncio.sleep(pool.startup_seconds)
        await self.add(pool.flavor)
        await asyncio.sleep(SCAN_SECONDS)
        pool.coming -= 1

    async def _write_events(self, pool: NodePool, pending: Sequence[Object], count: int) -> None:
        """Write the Events of pods for which nodes are requested."""
        now = len(self.named(KIND, pool.flavor))
        message = f"pod triggered scale-up: [{{{pool.flavor} {now}->{now + count} (max: 1000)}}]"
        pods = [pod for pod in pending if pod["metadata"]["uid"] not in self._notified]
        self._notified |= {pod["metadata"]["uid"] for pod in pods}
        written = (
            event(pod, "TriggeredScaleUp", message, decision="", by=MANAGER, now_seconds=time.time()) for pod in pods
        )
        await asyncio.gather(*(self.cluster.create(each, manager=MANAGER) for each in written))
