"""Manifests that the chart renders: compared with expected ones, values checked against the schema."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm import (
    CHART,
    KINDS_CHART,
    KUBERNETES,
    SETS,
    VALUES,
    Manifest,
    helm,
    pod_specs,
    rendered,
    template,
)
from trimtab_operator.settings import Settings
from trimtab_pipelines.documents import load_pools
from trimtab_pipelines.edge_settings import ReplicaIdentity

UPDATE = "TRIMTAB_UPDATE_GOLDEN"


@pytest.mark.parametrize("chart", [CHART, KINDS_CHART], ids=lambda chart: chart.name)
def test_lint_passes(chart: Path):
    done = helm("lint", "--strict", "--kube-version", KUBERNETES, chart)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", SETS)
def test_manifests_match_expected_ones(values: str):
    """With TRIMTAB_UPDATE_GOLDEN=1 the files are written anew, for a review of their difference."""
    golden = VALUES / f"{values}.yaml"
    text = yaml.safe_dump_all([shortened(manifest) for manifest in rendered(values)], sort_keys=False, width=120)
    if os.environ.get(UPDATE):
        golden.write_text(text)

    assert golden.read_text() == text, f"{golden.name} differs; look at the difference, then {UPDATE}=1"


def shortened(manifest: Manifest) -> Manifest:
    """Leave out what other tests compare: definitions and dashboards, which are files of their own."""
    if manifest["kind"] == "CustomResourceDefinition":
        return {"kind": manifest["kind"], "metadata": manifest["metadata"]}
    if "dashboard" in manifest["metadata"]["name"]:
        return manifest | {"data": sorted(manifest["data"])}
    return manifest


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("replicas=2", "replicas"),
        ("operator.replicas=two", "/operator/replicas"),
        ("operator.replicas=9", "/operator/replicas"),
        ("image.control.pullPolicy=Sometimes", "/image/control/pullPolicy"),
        ("image.control.tag=", "/image/control/tag"),
        ("namespaces=team-a", "/namespaces"),
        ("namespaces={Team A}", "/namespaces/0"),
        ("prometheus.url=prometheus:9090", "/prometheus/url"),
        ("trainer.schedule=daily", "/trainer/schedule"),
        ("serviceMonitor.interval=15", "/serviceMonitor/interval"),
        ("fullnameOverride=Trim_Tab", "/fullnameOverride"),
        ("budgetPools.shared.gpus=1", "/budgetPools/shared"),
        ("crds.enable=false", "/crds"),
        ("edge.replicas.tlsSecret=Not_A_Name", "/edge/replicas/tlsSecret"),
        ("edge.replicas.name=two words", "/edge/replicas/name"),
    ],
)
def test_invalid_value_is_rejected_by_name(setting: str, complaint: str):
    done = template("--set", setting)

    assert done.returncode != 0
    assert complaint in done.stderr.replace(".", "/") or complaint in done.stderr


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("trainer.enabled=true", "trainer.enabled needs prometheus.url"),
        ("edge.replicas.name=replicas.example", "edge.replicas.name needs edge.replicas.tlsSecret"),
        ("edge.tls.clientCa=true", "edge.tls.clientCa needs edge.tls.secretName, or edge.secure"),
    ],
)
def test_value_without_the_one_it_needs_is_rejected(setting: str, complaint: str):
    done = template("--set", setting)

    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("secret", ["edge.secure=true", "edge.tls.secretName=mine"])
def test_client_ca_is_rendered_with_a_secret(secret: str):
    assert "clientCa" in template("--set", "edge.tls.clientCa=true", "--set", secret).stdout


def test_listed_namespaces_render_no_cluster_roles():
    kinds = {manifest["kind"] for manifest in rendered("namespaced")}

    assert kinds & {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"} == set()


@pytest.mark.parametrize(("values", "namespaces"), [("default", [None]), ("namespaced", ["team-a", "team-b"])])
def test_router_roles_outlive_the_release(values: str, namespaces: list[str | None]):
    """A router that restarts after the release is gone has to hear of its plan and replicas."""
    roles = [m for m in rendered(values) if m["kind"] in {"ClusterRole", "Role"}]
    kept = [m for m in roles if m["metadata"].get("annotations") == {"helm.sh/resource-policy": "keep"}]

    assert [m["metadata"]["name"] for m in kept] == ["trimtab-router"] * len(namespaces)
    assert [m["metadata"].get("namespace") for m in kept] == namespaces


@pytest.mark.parametrize(
    ("setting", "watched"), [("", False), ("watchNodes=true", True), ("resourceFlavors[0].name=l4", True)]
)
def test_nodes_are_read_only_if_needed(setting: str, *, watched: bool):
    (role,) = (
        each
        for each in yaml.safe_load_all(template(*(("--set", setting) if setting else ())).stdout)
        if each and each["kind"] == "ClusterRole" and each["metadata"]["name"] == "trimtab-operator"
    )
    verbs = {name: rule["verbs"] for rule in role["rules"] for name in rule["resources"]}

    assert verbs.get("nodes") == (["list", "watch"] if watched else None)
    assert ("patch" in verbs["pods"]) is watched


def environment(manifests: list[Manifest], name: str) -> dict[str, Any]:
    return {e["name"]: e.get("value", "x") for e in pod_specs(manifests)[name]["containers"][0]["env"]}


def test_operator_settings_round_trip():
    wide = Settings.from_environment(environment(rendered("everything"), "tabs-operator"))
    narrow = Settings.from_environment(environment(rendered("namespaced"), "trimtab-operator"))

    assert wide.control_image == "images.example/trimtab-control:0.2.0"
    assert wide.model_server_image == "images.example/trimtab-model-server:0.2.0"
    assert (wide.image_pull_secrets, wide.role_kind, wide.namespaces) == (("images",), "ClusterRole", ())
    assert wide.node_cache == "/var/cache/trimtab"
    assert (wide.watches_nodes, narrow.watches_nodes) == (True, False)
    assert [flavor.spot for flavor in wide.flavors] == [True]
    assert wide.limits_egress
    assert wide.egress_blocked == ("169.254.169.254/32",)
    assert wide.api_server_ports == (443, 16443)
    assert [rule["ports"][0]["port"] for rule in wide.extra_egress] == [4317]
    folder, identity = "/etc/trimtab-replicas", wide.edge.replicas
    assert identity == ReplicaIdentity(
        certificate=f"{folder}/tls.crt",
        key=f"{folder}/tls.key",
        ca=f"{folder}/ca.crt",
        name="spiffe://example/replicas",
    )
    assert (wide.edge_replicas_secret, narrow.edge_replicas_secret, narrow.edge.replicas) == ("identity", "", None)
    assert narrow.egress_blocked == Settings().egress_blocked
    assert (narrow.role_kind, narrow.namespaces) == ("Role", ("team-a", "team-b"))


def test_adapter_parses_the_pools(tmp_path):
    found = next(m for m in rendered("everything") if m["metadata"]["name"] == "tabs-pools")
    (tmp_path / "pools.yaml").write_text(found["data"]["pools.yaml"])

    shared = load_pools(tmp_path / "pools.yaml").pools["shared"]
    assert (shared.cores, shared.gpus, shared.namespaces, shared.max_gain) == (16.0, 2, ("team-a",), 5.0)


def test_changed_pools_replace_the_adapter_pod_only():
    """The adapter reads its pools as it starts."""

    def templates(cores: int) -> dict[str, Any]:
        done = template("--set-string", f"budgetPools.shared.cores={cores}", "--set", "podAnnotations.team=a")
        assert done.returncode == 0, done.stderr
        made = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Deployment"]
        return {one["metadata"]["name"]: one["spec"]["template"] for one in made}

    few, again, many = templates(16), templates(16), templates(32)
    assert few == again
    assert {name for name in few if few[name] != many[name]} == {"trimtab-adapter"}
    assert {made["metadata"]["annotations"]["team"] for made in many.values()} == {"a"}


def test_each_pod_has_ingress_and_egress_policies():
    policies = {m["metadata"]["name"]: m["spec"] for m in rendered("everything") if m["kind"] == "NetworkPolicy"}
    pods = pod_specs(rendered("everything"))

    assert set(policies) == set(pods) == {"tabs-operator", "tabs-adapter", "tabs-trainer"}
    for spec in policies.values():
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert {"ports": [{"port": 443}, {"port": 16443}]} in spec["egress"]
        assert spec["egress"][-1]["ports"] == [{"port": 4317, "protocol": "TCP"}]
    assert policies["tabs-trainer"]["ingress"] == []
    assert "kind: NetworkPolicy" not in template("--set", "networkPolicies.enabled=false").stdout


def test_every_value_is_documented():
    """Each top-level key of values.yaml is in the schema, and the other way round."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    assert set(values) == set(schema["properties"]) - {"global", "trimtab-crds"}
