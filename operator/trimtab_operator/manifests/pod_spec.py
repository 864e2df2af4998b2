"""Common parts of pod specs, at the Pod Security level `restricted`.

Containers request cores without a limit, since a limit below a core stalls a batch for most of each scheduling period.
Memory is requested and limited alike.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_kubernetes.objects import Object
from trimtab_operator.settings import Settings
from trimtab_pipelines.flavors import DEFAULT_FLAVOR, ResourceFlavor
from trimtab_pipelines.kubernetes_names import CREDENTIALS_PREFIX
from trimtab_pipelines.quantity import format_bytes, format_cores
from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.variants import Variant

USER = 65532
ZONE = "topology.kubernetes.io/zone"
STOP_DELAY_SECONDS = 5
"""Time for which a terminating pod continues to serve until its endpoints are updated; routers wait as long themselves.
"""
GRACE_SECONDS = 60
"""Of a pod that serves no requests."""
GRACE_MARGIN_SECONDS = 25
"""For other shutdown work; a model server waits up to 20 s until it gets no more requests."""


def security_of_pod() -> Object:
    """Pod security context; files in volumes belong to the container's user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def security_of_user_pod() -> Object:
    """Pod security context of a user-provided container, which has its own user."""
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def security_of_container(*, read_only: bool = True) -> Object:
    context: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return context | ({"readOnlyRootFilesystem": True} if read_only else {})


def resources(cores: float, memory_bytes: int, devices: int = 0, flavor: ResourceFlavor = DEFAULT_FLAVOR) -> Object:
    """Requests and limits; cores have no limit."""
    memory = format_bytes(memory_bytes)
    requests: Object = {"cpu": format_cores(cores), "memory": memory}
    limits: Object = {"memory": memory}
    if devices:
        requests[flavor.device] = limits[flavor.device] = str(devices)
    return {"requests": requests, "limits": limits}


def image_pull_secrets(settings: Settings) -> Object:
    names = [{"name": name} for name in settings.image_pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def requested_devices(requests: Mapping[str, Any]) -> int:
    """Devices of a container's requests: extended resources, whose names have a domain."""
    return sum(int(amount) for name, amount in requests.items() if "/" in name)


def node_placement(variant: Variant, flavor: ResourceFlavor) -> Object:
    """Nodes of a variant and of its resource flavor."""
    fields: Object = {}
    if selected := {**flavor.node_selector, **variant.node_selector}:
        fields["nodeSelector"] = selected
    if tolerated := dict.fromkeys((*flavor.tolerations, *variant.tolerations)):
        fields["tolerations"] = [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in tolerated]
    if variant.runtime_class_name:
        fields["runtimeClassName"] = variant.runtime_class_name
    return fields


def spread(selected: Mapping[str, str], *topologies: str) -> Object:
    """Spread pods evenly over zones or nodes, if there is room."""
    rules = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selected)},
        }
        for key in topologies
    ]
    return {"topologySpreadConstraints": rules}


def environment_variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def credentials(secret: str | None) -> Object:
    """`envFrom` of a Secret with a prefix, so that its keys cannot override other variables."""
    return {"envFrom": [{"prefix": CREDENTIALS_PREFIX, "secretRef": {"name": secret}}]} if secret else {}


def probe(path: str, port: int | str, **timing: int) -> Object:
    return {"httpGet": {"path": path, "port": port}, **timing}


def pre_stop(drain_seconds: float = 0.0) -> Object:
    """Lifecycle hook that delays termination, by `drain_seconds` more; requires no shell."""
    return {"preStop": {"sleep": {"seconds": STOP_DELAY_SECONDS + math.ceil(drain_seconds)}}}


def termination_grace(slo: ServiceLevel) -> Object:
    """Termination grace period of a pod that serves requests, long enough for in-flight requests."""
    seconds = STOP_DELAY_SECONDS + math.ceil(slo.drain_seconds) + GRACE_MARGIN_SECONDS
    return {"terminationGracePeriodSeconds": seconds}


def deployment_spec(replicas: int, selector: Mapping[str, str], template: Object, *, surge: bool = True) -> Object:
    """Without `surge`, rollouts replace pods one by one, deleting first."""
    limits = {"maxSurge": int(surge), "maxUnavailable": int(not surge)}
    return {
        "replicas": replicas,
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": dict(selector)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": limits},
        "template": template,
    }


def scratch(*names: str) -> list[Object]:
    return [{"name": name, "emptyDir": {}} for name in names]


def pod(labels: Mapping[str, str], containers: Sequence[Object], **spec: Any) -> Object:
    """A pod template without API server credentials, unless `spec` adds them."""
    return {
        "metadata": {"labels": dict(labels)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": list(containers),
            **spec,
        },
    }
