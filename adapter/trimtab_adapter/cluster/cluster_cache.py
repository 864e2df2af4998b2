"""What a fleet of loops knows of the cluster: pipelines, plans, profiles, and where the routers are."""

from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.objects import Object, key_of

PIPELINE, PROFILE, PLAN, SLICE = "InferencePipeline", "ModelProfile", "PipelinePlan", "EndpointSlice"
SERVICE_LABEL = "kubernetes.io/service-name"
SELECTORS = {PIPELINE: None, PROFILE: None, PLAN: None, SLICE: SERVICE_LABEL}
OwnerKey = tuple[str, str, str]
"""Of which kind, in which namespace, to what: profiles to pipelines, slices to Services, others to themselves."""


class ClusterCache(Cache[OwnerKey]):
    """Objects by kind and name, and by what they belong to."""

    def __init__(self) -> None:
        super().__init__(owner_key)

    def owned_by(self, kind: str, namespace: str, owner: str) -> list[Object]:
        """The profiles of a pipeline, or the slices of a Service."""
        return self.group((kind, namespace, owner))


def owner_key(found: Object) -> OwnerKey:
    """What an object belongs to."""
    kind, (namespace, owner) = found["kind"], key_of(found)
    if kind == PROFILE:
        owner = str(found.get("spec", {}).get("pipeline", ""))
    elif kind == SLICE:
        owner = str(found["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))
    return kind, namespace, owner
