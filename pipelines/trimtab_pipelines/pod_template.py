"""`PodTemplate`: what a user adds to the pods of a variant's replicas."""

import json
from typing import Final, Self

from pydantic import Field, JsonValue, model_validator

from trimtab_pipelines.kubernetes_names import GROUP
from trimtab_pipelines.resource import Model

MAX_BYTES: Final = 2**16
_OWN_LABELS: Final = (f"{GROUP}/", "app.kubernetes.io/")
_OWN_FIELDS: Final = {
    "serviceAccountName": "set spec.serviceAccountName of the pipeline",
    "automountServiceAccountToken": "replicas have no credentials of the API server",
    "restartPolicy": "replicas are restarted always",
}


class PodMetadata(Model):
    """Labels and annotations of pods."""

    labels: dict[str, str] = Field(default_factory=dict, max_length=64)
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)


class PodTemplate(Model):
    """Fields merged into the pods of the replicas. Not used by `trimtab up`."""

    metadata: PodMetadata = PodMetadata()
    spec: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of Kubernetes' PodSpec, such as volumes, affinity, priorityClassName, securityContext and containers.
    Lists of named entries are merged by name, other lists are replaced. The replica's container is named model-server.
    """

    @model_validator(mode="after")
    def _require_mergeable(self) -> Self:
        if own := next((label for label in self.metadata.labels if label.startswith(_OWN_LABELS)), None):
            raise ValueError(f"podTemplate.metadata.labels: {own} is Trimtab's; remove it")
        for field, reason in _OWN_FIELDS.items():
            if field in self.spec:
                raise ValueError(f"podTemplate.spec: remove {field}: {reason}")
        for field in ("containers", "initContainers", "volumes"):
            entries = self.spec.get(field, [])
            named = isinstance(entries, list) and all(isinstance(e, dict) and e.get("name") for e in entries)
            if not named:
                raise ValueError(f"podTemplate.spec.{field}: give a list of entries with names")
        if (size := len(json.dumps(self.spec))) > MAX_BYTES:
            raise ValueError(f"podTemplate.spec has {size} bytes as JSON; give at most {MAX_BYTES}")
        return self
