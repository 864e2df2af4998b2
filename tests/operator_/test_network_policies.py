"""Ingress and egress of a pipeline's pods under the rendered NetworkPolicies."""

from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.operator_.conftest import owned
from tests.router.chats import a_chat_pipeline
from tests.router.disaggregated import a_disaggregated_pipeline
from trimtab_operator.manifests.network_policies import network_policies
from trimtab_operator.settings import Settings
from trimtab_pipelines.edge_settings import EdgeSettings, ReplicaIdentity

DEFAULT = Settings()
METADATA, METADATA_6, STORE, API_SERVER = "169.254.169.254", "fd00:ec2::254", "203.0.113.7", "10.96.0.1"
TASK = {"name": "late", "storageUri": "s3://b/late.safetensors"}
CONTAINER = {"name": "own", "accuracy": 0.9, "container": {"image": "triton:1", "port": 8000}}


@dataclass(frozen=True)
class Pod:
    """A pod, as policies see one."""

    component: str
    pipeline: str = "sample"
    namespace: str = "team"
    data: int = 9000
    """The number of its port of that name."""
    metrics: int = 9002
    """The same."""

    @property
    def labels(self) -> dict[str, str]:
        return {"trimtab.dev/pipeline": self.pipeline, "app.kubernetes.io/component": self.component}


ROUTER, SERVER, PROFILER = Pod("router"), Pod("model-server"), Pod("profiler")
OTHER_PODS = [Pod("model-server", pipeline="other"), Pod("router", pipeline="other"), Pod("router", namespace="else")]


def policies(*variants: dict[str, Any], settings: Settings = DEFAULT) -> list[dict[str, Any]]:
    pipeline = a_pipeline([a_stage(variants=list(variants) or [a_variant()])])
    return network_policies(owned(pipeline), settings)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def is_peer(peer: dict[str, Any], other: Pod | str) -> bool:
    """Whether a pod, or an address outside the cluster, is who a rule means; both in the policy's namespace or not."""
    if isinstance(other, str):
        block, address = peer.get("ipBlock"), ip_address(other)
        if block is None or address not in ip_network(block["cidr"]):
            return False
        return not any(address in ip_network(part) for part in block.get("except", []))
    if "ipBlock" in peer or ("namespaceSelector" not in peer and other.namespace != "team"):
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def _number(pod: Pod, named: str | int) -> int:
    return named if isinstance(named, int) else {"data": pod.data, "metrics": pod.metrics}[named]


def allows(written: list[dict[str, Any]], direction: str, pod: Pod, other: Pod | str, port: int) -> bool:
    way, peers = {"Egress": ("egress", "to"), "Ingress": ("ingress", "from")}[direction]
    relevant = [
        policy["spec"]
        for policy in written
        if selects(policy["spec"]["podSelector"], pod.labels) and direction in policy["spec"]["policyTypes"]
    ]
    rules = [rule for spec in relevant for rule in spec.get(way, [])]
    return not relevant or any(
        ("ports" not in rule or port in {_number(pod, one["port"]) for one in rule["ports"]})
        and (peers not in rule or any(is_peer(peer, other) for peer in rule[peers]))
        for rule in rules
    )


def test_only_own_routers_reach_the_data_port_of_model_servers():
    written = policies()

    assert allows(written, "Ingress", SERVER, ROUTER, 9000)
    assert not allows(written, "Ingress", SERVER, ROUTER, 8080)
    assert not any(allows(written, "Ingress", SERVER, pod, 9000) for pod in OTHER_PODS)
    assert not allows(written, "Ingress", SERVER, STORE, 9000)
    assert allows(policies(CONTAINER), "Ingress", replace(SERVER, data=8000), ROUTER, 8000)
    assert not allows(policies(CONTAINER), "Ingress", replace(SERVER, data=8000), ROUTER, 9000)


def test_changed_container_port_keeps_the_old_port_open():
    written = policies(CONTAINER | {"container": {"image": "triton:1", "port": 8001}})

    for port in (8000, 8001):
        assert allows(written, "Ingress", replace(SERVER, data=port), ROUTER, port)
        assert allows(written, "Egress", ROUTER, replace(SERVER, data=port), port)


def test_mutual_tls_limits_containers_to_the_guarded_port():
    guarded = replace(DEFAULT, edge=EdgeSettings(replicas=ReplicaIdentity(certificate="/a", key="/b", ca="/c")))
    for direction, pods in (("Ingress", (SERVER, ROUTER)), ("Egress", (ROUTER, SERVER))):
        assert allows(policies(CONTAINER, settings=guarded), direction, *pods, 9443)
        assert not allows(policies(CONTAINER, settings=guarded), direction, *pods, 8000)
    where_it_is = CONTAINER | {"container": {"image": "triton:1", "port": 9443}}
    assert allows(policies(where_it_is, settings=guarded), "Ingress", SERVER, ROUTER, 9444)
    assert not allows(policies(where_it_is, settings=guarded), "Ingress", SERVER, ROUTER, 9443)


def test_routers_reach_model_servers_and_the_api_server_only():
    written = policies()

    assert allows(written, "Egress", ROUTER, SERVER, 9000)
    assert allows(written, "Egress", ROUTER, API_SERVER, 443)
    assert allows(written, "Egress", ROUTER, API_SERVER, 53)
    assert not any(allows(written, "Egress", ROUTER, pod, 9000) for pod in OTHER_PODS)
    assert not allows(written, "Egress", ROUTER, METADATA, 80)
    assert not allows(written, "Egress", ROUTER, STORE, 80)


@pytest.mark.parametrize("uri", ["random://?seed=1", "weights/model.safetensors", "file:///weights/m.safetensors"])
def test_model_servers_with_local_weights_reach_dns_only(uri: str):
    written = policies(a_variant(storageUri=uri))

    assert allows(written, "Egress", SERVER, API_SERVER, 53)
    others: tuple[Pod | str, ...] = (METADATA, STORE, API_SERVER, ROUTER, *OTHER_PODS)
    for whom in others:
        assert not allows(written, "Egress", SERVER, whom, 443)


@pytest.mark.parametrize(
    "variant",
    [a_variant("fetched", storageUri="s3://b/m.safetensors"), a_variant("taught", tasks=[TASK]), CONTAINER],
    ids=["weights", "a task", "a container"],
)
def test_remote_weights_open_egress_except_to_node_metadata(variant: dict[str, Any]):
    written = policies(a_variant("small"), variant)

    assert allows(written, "Egress", SERVER, STORE, 9000)
    assert allows(written, "Egress", SERVER, Pod("minio", pipeline="", namespace="storage"), 9000)
    assert not allows(written, "Egress", SERVER, METADATA, 80)
    assert not allows(written, "Egress", SERVER, METADATA_6, 80)
    opened = policies(variant, settings=replace(Settings(), egress_blocked=()))
    assert allows(opened, "Egress", SERVER, METADATA, 80)


def test_profiler_reaches_the_api_server_unlike_model_servers():
    written = policies()

    assert allows(written, "Egress", PROFILER, API_SERVER, 6443)
    assert not allows(written, "Egress", SERVER, API_SERVER, 6443)
    assert not allows(written, "Ingress", PROFILER, OTHER_PODS[0], 9000)


def test_egress_can_be_extended_or_left_open():
    collector = {"to": [{"ipBlock": {"cidr": f"{STORE}/32"}}], "ports": [{"port": 4317, "protocol": "TCP"}]}
    settings = Settings.from_environment(
        {"TRIMTAB_EXTRA_EGRESS": f"[{collector}]".replace("'", '"'), "TRIMTAB_API_SERVER_PORTS": "16443"}
    )
    written = policies(settings=settings)

    assert allows(written, "Egress", ROUTER, STORE, 4317)
    assert allows(written, "Egress", ROUTER, API_SERVER, 16443)
    assert not allows(written, "Egress", ROUTER, API_SERVER, 443)
    unlimited = policies(settings=Settings.from_environment({"TRIMTAB_LIMIT_EGRESS": "false"}))
    assert allows(unlimited, "Egress", SERVER, METADATA, 80)
    assert not allows(unlimited, "Ingress", SERVER, OTHER_PODS[0], 9000)


def test_model_servers_reach_each_other_for_embeddings_only():
    pulled = network_policies(owned(a_disaggregated_pipeline()), DEFAULT)

    for direction in ("Ingress", "Egress"):
        assert allows(pulled, direction, SERVER, SERVER, 9000)
        assert not allows(policies(), direction, SERVER, SERVER, 9000)
        assert not any(allows(pulled, direction, SERVER, pod, 9000) for pod in OTHER_PODS)
    assert not allows(pulled, "Egress", SERVER, STORE, 9000)


def showing(**images: list[str]) -> list[dict[str, Any]]:
    return network_policies(owned(a_chat_pipeline(chat={"images": images})), DEFAULT)


def test_routers_fetch_images_from_listed_domains_and_stores():
    minio = Pod("minio", pipeline="", namespace="storage")
    stored = showing(trustedPrefixes=["http://minio.storage:9000/p/", "https://objects.internal/"])
    listed = showing(allowedDomains=["images.example"])

    for whom in (STORE, minio):
        assert allows(stored, "Egress", ROUTER, whom, 9000)
        assert allows(listed, "Egress", ROUTER, whom, 80)
        assert not allows(stored, "Egress", ROUTER, whom, 80)
        assert not allows(listed, "Egress", ROUTER, whom, 9000)
        assert not any(allows(showing(), "Egress", ROUTER, whom, port) for port in (80, 9000))
    assert allows(stored, "Egress", ROUTER, minio, 443)
    assert not allows(listed, "Egress", ROUTER, METADATA, 80)
    assert not allows(stored, "Egress", SERVER, minio, 9000)


def test_prometheus_reaches_only_the_metrics_of_chat_replicas():
    peers = replace(DEFAULT, admin_peers=({"podSelector": {"matchLabels": {"trimtab.dev/pipeline": "prometheus"}}},))
    prometheus = Pod("prometheus", pipeline="prometheus")
    for pipeline in (owned(a_chat_pipeline()), owned(a_disaggregated_pipeline())):
        written = network_policies(pipeline, peers)
        assert allows(written, "Ingress", SERVER, prometheus, 9002)
        assert not allows(written, "Ingress", SERVER, prometheus, 9000)
        assert not any(allows(written, "Ingress", SERVER, other, 9002) for other in (ROUTER, SERVER, *OTHER_PODS))
        assert not allows(network_policies(pipeline, DEFAULT), "Ingress", SERVER, prometheus, 9002)
    assert not allows(policies(settings=peers), "Ingress", SERVER, prometheus, 9002)
