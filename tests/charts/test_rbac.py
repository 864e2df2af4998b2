"""Rights of each service account, complete and exact, as the API server's authorizer reports them.

MAY lists every right. All other pairs of a verb and a resource the cluster has, Secrets and nodes among them, must be
refused, as must everything in namespaces that are none of an account's business.
"""

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.charts.conftest import NARROW_NAMESPACE
from tests.charts.helm import RELEASE_NAMESPACE
from tests.control_plane import tool
from trimtab_kubernetes import Cluster

FOLLOW = {"list", "watch"}
READ = FOLLOW | {"get"}
OWN = READ | {"create", "patch", "delete"}
VERBS = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]
SAMPLE_VERBS = ["get", "list", "create", "patch"]
"""A sample for namespaces without any right: each rule of the chart has one of these verbs."""
OURS = ["inferencepipelines", "modelprofiles", "pipelineplans"]
Rights = dict[str, set[str]]

OPERATOR: Rights = {
    **{f"trimtab.dev/{plural}": FOLLOW for plural in OURS},
    "trimtab.dev/inferencepipelines/status": {"patch"},
    "trimtab.dev/pipelineplans/status": {"patch"},
    "apps/deployments": OWN,
    "/services": OWN,
    "/configmaps": OWN,
    "/serviceaccounts": OWN,
    "/pods": FOLLOW | {"delete"},
    "networking.k8s.io/networkpolicies": OWN,
    "policy/poddisruptionbudgets": OWN,
    "batch/jobs": OWN,
    "monitoring.coreos.com/podmonitors": OWN,
    "machinelearning.seldon.io/seldondeployments": OWN,
    "rbac.authorization.k8s.io/roles": OWN,
    "rbac.authorization.k8s.io/rolebindings": OWN,
    "/events": {"create"},
}
ADAPTER: Rights = {
    "trimtab.dev/inferencepipelines": FOLLOW,
    "trimtab.dev/modelprofiles": FOLLOW,
    "trimtab.dev/pipelineplans": OWN,
    "trimtab.dev/inferencepipelines/status": {"patch"},
    "discovery.k8s.io/endpointslices": FOLLOW,
    "/events": {"create"},
}
ROUTER: Rights = {"trimtab.dev/pipelineplans": READ, "discovery.k8s.io/endpointslices": READ}
PROFILER: Rights = {"trimtab.dev/inferencepipelines": {"get"}, "trimtab.dev/modelprofiles": {"get", "create", "patch"}}
EVERYTHING = {*OPERATOR, *ADAPTER} | {
    "/secrets",
    "/nodes",
    "/namespaces",
    "/persistentvolumes",
    "/pods/exec",
    "/pods/log",
    "/pods/portforward",
    "/pods/ephemeralcontainers",
    "/serviceaccounts/token",
    "/endpoints",
    "apps/statefulsets",
    "apps/daemonsets",
    "batch/cronjobs",
    "coordination.k8s.io/leases",
    "rbac.authorization.k8s.io/clusterroles",
    "rbac.authorization.k8s.io/clusterrolebindings",
    "apiextensions.k8s.io/customresourcedefinitions",
    "admissionregistration.k8s.io/validatingwebhookconfigurations",
    "certificates.k8s.io/certificatesigningrequests",
    "networking.k8s.io/ingresses",
}


async def may(server: Cluster, user: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    group, _, rest = resource.partition("/")
    plural, _, subresource = rest.partition("/")
    attributes = {"group": group, "resource": plural, "subresource": subresource, "verb": verb}
    attributes |= {"namespace": namespace, "name": name}
    groups = ["system:serviceaccounts", "system:authenticated"]
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    answer = await server.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", None, body)
    return bool(answer["status"]["allowed"])


async def rights(server: Cluster, user: str, namespace: str, verbs: Sequence[str] = VERBS) -> Rights:
    """Ask about every verb of every resource in a namespace."""
    asked = [(resource, verb) for resource in sorted(EVERYTHING) for verb in verbs]
    answers: list[bool] = []
    for start in range(0, len(asked), 50):
        part = asked[start : start + 50]
        answers += await asyncio.gather(*(may(server, user, verb, resource, namespace) for resource, verb in part))
    found: Rights = {}
    for (resource, verb), allowed in zip(asked, answers, strict=True):
        if allowed:
            found.setdefault(resource, set()).add(verb)
    return found


def account(name: str, namespace: str = RELEASE_NAMESPACE) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


@pytest.mark.parametrize(("name", "expected"), [("trimtab-operator", OPERATOR), ("trimtab-adapter", ADAPTER)])
async def test_operator_and_adapter_rights_are_exact_in_any_namespace(server: Cluster, name: str, expected: Rights):
    assert await rights(server, account(name), "team-a") == expected


@pytest.mark.parametrize(("name", "expected"), [("narrow-operator", OPERATOR), ("narrow-adapter", ADAPTER)])
async def test_listed_namespaces_limit_the_rights(server: Cluster, name: str, expected: Rights):
    user = account(name, NARROW_NAMESPACE)

    assert await rights(server, user, "team-a") == expected
    assert await rights(server, user, "default", SAMPLE_VERBS) == {}
    assert await rights(server, user, "", SAMPLE_VERBS) == {}


async def test_trainer_may_change_one_config_map(server: Cluster):
    user, weights = account("trimtab-trainer"), "trimtab-forecaster"

    assert await rights(server, user, RELEASE_NAMESPACE) == {}
    for verb in VERBS:
        assert await may(server, user, verb, "/configmaps", RELEASE_NAMESPACE, weights) == (verb in {"get", "patch"})
        assert not await may(server, user, verb, "/configmaps", "team-a", weights)


@pytest.mark.parametrize("part", ["operator", "adapter"])
async def test_leader_may_hold_its_own_lease_only(server: Cluster, part: str):
    other = {"operator": "adapter", "adapter": "operator"}[part]
    user, lease = account(f"trimtab-{part}"), "coordination.k8s.io/leases"
    for verb in ("get", "update"):
        assert await may(server, user, verb, lease, RELEASE_NAMESPACE, f"trimtab-{part}")
        assert not await may(server, user, verb, lease, RELEASE_NAMESPACE, f"trimtab-{other}")
        assert not await may(server, user, verb, lease, "kube-system", f"trimtab-{part}")
    assert await may(server, user, "create", lease, RELEASE_NAMESPACE)


@pytest.mark.parametrize(("role", "expected"), [("trimtab-router", ROUTER), ("trimtab-profiler", PROFILER)])
@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
async def test_pipeline_accounts_have_rights_in_their_namespace_only(
    server: Cluster, role: str, expected: Rights, kind: str
):
    name = f"digits-{role}-{kind.lower()}"
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": "team-a"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "team-a"}],
    }
    await server.apply(binding, manager="tests")
    user = account(name, "team-a")

    await until_in_force(server, user, next(iter(expected)))
    assert await rights(server, user, "team-a") == expected
    assert await rights(server, user, "team-b", SAMPLE_VERBS) == {}


async def until_in_force(server: Cluster, user: str, resource: str) -> None:
    """Wait until the authorizer, which watches bindings, allows the account to get a resource."""
    while not await may(server, user, "get", resource, "team-a"):  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("user", "role", "allowed"),
    [
        (account("trimtab-operator"), "--clusterrole=trimtab-router", True),
        (account("trimtab-operator"), "--clusterrole=trimtab-profiler", True),
        (account("trimtab-operator"), "--clusterrole=cluster-admin", False),
        (account("trimtab-operator"), "--clusterrole=trimtab-adapter", False),
        (account("trimtab-operator"), "--role=trimtab-router", False),
        (account("narrow-operator", NARROW_NAMESPACE), "--role=trimtab-router", True),
        (account("narrow-operator", NARROW_NAMESPACE), "--clusterrole=cluster-admin", False),
        (account("trimtab-adapter"), "--clusterrole=trimtab-router", False),
    ],
)
def test_operator_binds_only_the_two_roles(installed: Path, user: str, role: str, allowed: bool):  # noqa: FBT001
    binding = ["create", "rolebinding", "bound", role, "--serviceaccount=team-a:digits", "-n", "team-a"]
    done = subprocess.run(
        [tool("kubectl"), f"--kubeconfig={installed}", *binding, f"--as={user}", "--dry-run=server"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode == 0) == allowed, done.stderr
    if not allowed:
        assert "forbidden" in done.stderr


@pytest.mark.parametrize(
    ("role", "verbs"),
    [
        ("trimtab-viewer", READ),
        ("trimtab-editor", READ | {"create", "update", "patch", "delete"}),
        ("trimtab-admin", set(VERBS)),
    ],
)
async def test_user_facing_roles_include_the_crds(server: Cluster, role: str, verbs: set[str]):
    found = await server.get("ClusterRole", None, role)
    assert found is not None
    by_resource: Rights = {}
    for rule in found["rules"]:
        assert rule["apiGroups"] == ["trimtab.dev"]
        assert "resourceNames" not in rule
        for resource in rule["resources"]:
            by_resource.setdefault(resource, set()).update(rule["verbs"])
    aggregated = {"trimtab-viewer": "view", "trimtab-editor": "edit", "trimtab-admin": "admin"}[role]

    status_rights = {f"{kind}/status": {"get"} for kind in ("inferencepipelines", "pipelineplans")}
    assert by_resource == dict.fromkeys(OURS, verbs) | status_rights
    assert found["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{aggregated}"] == "true"
