"""`ClusterCache`: pipelines, plans, profiles and router EndpointSlices of the watched namespaces."""

from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.objects import Object, key_of

PIPELINE, PROFILE, PLAN, SLICE = "InferencePipeline", "ModelProfile", "PipelinePlan", "EndpointSlice"
SERVICE_LABEL = "kubernetes.io/service-name"
SELECTORS = {PIPELINE: None, PROFILE: None, PLAN: None, SLICE: SERVICE_LABEL}
OwnerKey = tuple[str, str, str]
"""Kind, namespace and owner: the pipeline of a profile, the Service of a slice, the object itself otherwise."""


class ClusterCache(Cache[OwnerKey]):
    """Objects by kind and name, and by owner."""

    def __init__(self) -> None:
        super().__init__(owner_key)

    def owned_by(self, kind: str, namespace: str, owner: str) -> list[Object]:
        return self.group((kind, namespace, owner))


def owner_key(resource: Object) -> OwnerKey:
    kind, (namespace, owner) = resource["kind"], key_of(resource)
    if kind == PROFILE:
        owner = str(resource.get("spec", {}).get("pipeline", ""))
    elif kind == SLICE:
        owner = str(resource["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))
    return kind, namespace, owner
