"""API paths of the supported kinds: group, version and plural."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_pipelines.resource import API_VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = [part for part in (name, subresource) if part]
        return "/".join((f"{root}{within}/{self.plural}", *parts))


KINDS = (
    Kind(API_VERSION, "InferencePipeline", "inferencepipelines"),
    Kind(API_VERSION, "ModelProfile", "modelprofiles"),
    Kind(API_VERSION, "PipelinePlan", "pipelineplans"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "Event", "events"),
    Kind("v1", "Namespace", "namespaces", namespaced=False),
    Kind("v1", "Node", "nodes", namespaced=False),
    Kind("v1", "Pod", "pods"),
    Kind("v1", "Secret", "secrets"),
    Kind("v1", "Service", "services"),
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("apps/v1", "Deployment", "deployments"),
    Kind("batch/v1", "CronJob", "cronjobs"),
    Kind("batch/v1", "Job", "jobs"),
    Kind("coordination.k8s.io/v1", "Lease", "leases"),
    Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False),
    Kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False),
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    Kind("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
    Kind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    Kind("machinelearning.seldon.io/v1", "SeldonDeployment", "seldondeployments"),
)
_BY_NAME = {kind.kind: kind for kind in KINDS}


def kind_of(named: str | Mapping[str, Any]) -> Kind:
    """A kind by name, or of an object; KeyError if unsupported."""
    name = named if isinstance(named, str) else str(named["kind"])
    return _BY_NAME[name]
