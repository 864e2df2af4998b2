"""What our pods have in common: they pass the Pod Security level `restricted`, and take no more rights than they use.

Containers ask for their cores but are not limited to them: a limit below a core stalls a batch for most of each
scheduling period. Memory is asked for and limited alike. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_kubernetes.objects import Object
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import CREDENTIALS_PREFIX
from trimtab_pipelines.quantity import format_bytes, format_cores
from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.variants import Variant

USER = 65532
GPU_RESOURCE = "nvidia.com/gpu"
STOP_DELAY_SECONDS = 5
"""A pod serves on for this long after it was told to stop, until everybody knows that it goes.

A router lingers as long, by itself."""
GRACE_SECONDS = 60
"""Of a pod that answers nobody."""
GRACE_MARGIN_SECONDS = 25
"""For all else that a pod does while it stops: a model server waits up to 20 s until nobody asks it any more."""


def security_of_pod() -> Object:
    """The pod's security context; files in volumes belong to our user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def security_of_container(*, read_only: bool = True) -> Object:
    """A container's security context."""
    context: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return context | ({"readOnlyRootFilesystem": True} if read_only else {})


def resources(cores: float, memory_bytes: int, gpus: int = 0) -> Object:
    """Requests and limits: cores asked for only, memory and GPUs limited too."""
    memory = format_bytes(memory_bytes)
    requests: Object = {"cpu": format_cores(cores), "memory": memory}
    limits: Object = {"memory": memory}
    if gpus:
        requests[GPU_RESOURCE] = limits[GPU_RESOURCE] = str(gpus)
    return {"requests": requests, "limits": limits}


def image_pull_secrets(settings: Settings) -> Object:
    """The pod's field for them, or nothing."""
    names = [{"name": name} for name in settings.image_pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def node_placement(variant: Variant) -> Object:
    """The pod's fields that choose its node."""
    fields: Object = {}
    if variant.node_selector:
        fields["nodeSelector"] = dict(variant.node_selector)
    if variant.tolerations:
        fields["tolerations"] = [
            toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in variant.tolerations
        ]
    if variant.runtime_class_name:
        fields["runtimeClassName"] = variant.runtime_class_name
    return fields


def environment_variables(given: Mapping[str, str]) -> list[Object]:
    """A container's env."""
    return [{"name": name, "value": value} for name, value in given.items()]


def credentials(secret: str | None) -> Object:
    """A container's envFrom of a Secret whose keys cannot be mistaken for environment_variables of the container itself."""
    return {"envFrom": [{"prefix": CREDENTIALS_PREFIX, "secretRef": {"name": secret}}]} if secret else {}


def probe(path: str, port: int | str, **timing: int) -> Object:
    """An HTTP probe; `timing` takes the probe's own words."""
    return {"httpGet": {"path": path, "port": port}, **timing}


def pre_stop() -> Object:
    """The lifecycle of a container that goes on for a while; it needs no shell."""
    return {"preStop": {"sleep": {"seconds": STOP_DELAY_SECONDS}}}


def termination_grace(slo: ServiceLevel) -> Object:
    """The field of a pod that answers requests: when it stops, answers under way are given as they were promised."""
    seconds = STOP_DELAY_SECONDS + math.ceil(slo.drain_seconds) + GRACE_MARGIN_SECONDS
    return {"terminationGracePeriodSeconds": seconds}


def scratch(*names: str) -> list[Object]:
    """Volumes that live as long as the pod."""
    return [{"name": name, "emptyDir": {}} for name in names]


def pod(marks: Mapping[str, str], containers: Sequence[Object], **spec: Any) -> Object:
    """A pod template without rights at the API server, unless `spec` gives it some."""
    return {
        "metadata": {"labels": dict(marks)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": list(containers),
            **spec,
        },
    }
