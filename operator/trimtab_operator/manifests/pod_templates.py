"""Merge of a user's pod template into a rendered one, as by Kubernetes' strategic merge patch."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import MODEL_SERVER, PROFILER
from trimtab_pipelines.pod_template import PodTemplate

_MERGE_KEYS: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists whose entries are merged, and the field that identifies an entry; other lists are replaced."""


def with_pod_template(pod: Object, template: PodTemplate | None) -> Object:
    """A pod of a replica with what its user adds."""
    return pod if template is None else _merged(pod, template.model_dump(mode="json"))


def profiler_with_pod_template(pod: Object, template: PodTemplate | None, *, sidecar: bool) -> Object:
    """A profiler's pod with what a user adds to replicas.

    The replica is the container of the profiler, or a `sidecar` of it. Further containers are left out, since the Job
    would not end before them.
    """
    if template is None:
        return pod
    spec: Object = dict(template.spec)
    servers = [container for container in spec.pop("containers", ()) if container["name"] == MODEL_SERVER]
    if sidecar:
        spec["initContainers"] = [*spec.get("initContainers", ()), *servers]
    else:
        spec["containers"] = [{**container, "name": PROFILER} for container in servers]
    return _merged(pod, {"metadata": template.metadata.model_dump(mode="json"), "spec": spec})


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    merged = dict(base)
    for name, value in patch.items():
        existing = base.get(name)
        if isinstance(existing, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(existing, value)
        elif name in _MERGE_KEYS and isinstance(existing, list) and _has_entries(value):
            merged[name] = _merged_entries(name, existing, value)
        elif value not in ({}, []):
            merged[name] = value
    return merged


def _has_entries(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _merged_entries(name: str, existing: Sequence[Object], added: Sequence[Object]) -> list[Object]:
    """Entries merged by their key; new ones come last, but new init containers first."""
    key = _MERGE_KEYS[name]
    patches = {str(entry.get(key)): entry for entry in added}
    kept = [_merged(entry, patches.pop(str(entry.get(key)), {})) for entry in existing]
    return [*patches.values(), *kept] if name == "initContainers" else [*kept, *patches.values()]
