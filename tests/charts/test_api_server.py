"""Chart on a real API server: manifests accepted, pods admitted, and the life cycle of a release."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import control_plane
from tests.builders import a_pipeline_document
from tests.charts.helm import CHART, KINDS_CHART, RELEASE_NAMESPACE, SETS, must, pod_specs, rendered
from tests.control_plane import define
from trimtab_kubernetes import Cluster, kind_of

MONITORING = {"PodMonitor": "podmonitors", "ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"}
ROUTERS_ROLE = "clusterrole.rbac.authorization.k8s.io/trimtab-router"
STRICT = {"pod-security.kubernetes.io/enforce": "restricted"}


def stand_in(kind: str, plural: str) -> dict[str, Any]:
    """A definition for a kind of the Prometheus Operator, whose own definitions are not part of this project."""
    open_schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    group = "monitoring.coreos.com"
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": open_schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def kubectl(kubeconfig: Path, *arguments: str, given: str | None = None) -> str:
    done = asked(kubeconfig, *arguments, given=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(kubeconfig: Path, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [control_plane.tool("kubectl"), f"--kubeconfig={kubeconfig}", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


def wait_for_our_kinds(kubeconfig: Path) -> None:
    """Wait until kubectl knows them: installing does not, and a definition takes a moment to be served."""
    until = time.monotonic() + 60
    while (done := asked(kubeconfig, "get", "ipl,modelprofiles,pipelineplans")).returncode:
        assert time.monotonic() < until, done.stderr


@pytest.mark.parametrize("values", SETS)
async def test_every_manifest_is_accepted(server: Cluster, values: str):
    await define(server, *(stand_in(kind, plural) for kind, plural in MONITORING.items()))

    for manifest in rendered(values):
        if kind_of(manifest).namespaced:
            assert manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        await server.apply(manifest, manager="tests", dry_run=True)


async def test_restricted_level_admits_every_pod(server: Cluster):
    """It rejects a pod without a security context."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": STRICT}}
    await server.apply(namespace, manager="tests")

    async def admit(name: str, spec: dict[str, Any]) -> None:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "strict"}, "spec": spec}
        await server.apply(pod, manager="tests", dry_run=True)

    for name, spec in pod_specs(rendered("everything")).items():
        await admit(name, spec)
    with pytest.raises(Exception, match="violates PodSecurity"):
        await admit("lax", spec | {"securityContext": {}})


def revision(kubeconfig: Path) -> dict[str, Any]:
    listed = json.loads(must("list", "-n", RELEASE_NAMESPACE, "-o", "json", kubeconfig=kubeconfig))
    return dict(listed[0])


def test_release_survives_upgrade_rollback_and_reinstall():
    """Uninstalling leaves pipelines, their kinds and what routers may read; installing again takes these over."""
    with control_plane.api_server() as kubeconfig:
        release = ("trimtab", CHART, "-n", RELEASE_NAMESPACE)
        notes = must("install", *release, "--create-namespace", kubeconfig=kubeconfig)
        assert "kubectl get ipl" in notes
        pipeline = a_pipeline_document()
        wait_for_our_kinds(kubeconfig)
        kubectl(kubeconfig, "apply", "-f", "-", given=json.dumps(pipeline))

        must("upgrade", *release, "--set", "adapter.replicas=2", kubeconfig=kubeconfig)
        assert replicas(kubeconfig) == "2"
        must("rollback", "trimtab", "1", "-n", RELEASE_NAMESPACE, kubeconfig=kubeconfig)
        assert replicas(kubeconfig) == "1"
        assert revision(kubeconfig)["revision"] == "3"

        must("uninstall", "trimtab", "-n", RELEASE_NAMESPACE, kubeconfig=kubeconfig)
        left = kubectl(kubeconfig, "get", "deployments,clusterroles,clusterrolebindings", "-A", "-o", "name")
        assert [name for name in left.split() if "trimtab" in name] == [ROUTERS_ROLE]
        assert kubectl(kubeconfig, "get", "ipl", "-o", "name") == "inferencepipeline.trimtab.dev/sample\n"

        must("install", *release, kubeconfig=kubeconfig)
        assert kubectl(kubeconfig, "get", "ipl", "-o", "name") == "inferencepipeline.trimtab.dev/sample\n"
        must("upgrade", *release, kubeconfig=kubeconfig)


def replicas(kubeconfig: Path) -> str:
    query = "-o=jsonpath={.spec.replicas}"
    return kubectl(kubeconfig, "get", "deployment", "trimtab-adapter", "-n", RELEASE_NAMESPACE, query)


def test_crds_can_be_installed_separately(tmp_path: Path):
    found = [*yaml.safe_load_all(must("template", "crds", KINDS_CHART, "--kube-version", "1.34.0"))]

    assert {body["kind"] for body in found} == {"CustomResourceDefinition"}
    assert {body["metadata"]["annotations"]["helm.sh/resource-policy"] for body in found} == {"keep"}
