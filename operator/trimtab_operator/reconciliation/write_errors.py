"""Rejected writes: objects of other owners, and objects that the cluster rejects or alters.

Objects of other owners are never overwritten, even if a pipeline's name matches. Rejected writes are retried when the
manifest changes, and with backoff, since the cause may be resolved without an event.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trimtab_kubernetes.conditions import ConditionState, failing, ok
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import Ref, ref_of
from trimtab_pipelines.errors import pause_seconds
from trimtab_pipelines.kubernetes_names import MANAGED_BY, PIPELINE_LABEL

Reason = Literal["NotOwned", "FieldNotApplied", "WriteRejected"]
OBJECTS_WRITTEN = "ObjectsWritten"
INITIAL_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RejectedWrite:
    """An object that could not be written."""

    ref: Ref
    reason: Reason
    message: str
    version: str
    """Fingerprint of the rejected manifest."""
    at: float
    attempts: int = 1
    """Consecutive rejections."""

    @property
    def until(self) -> float:
        """Time of the next retry, unless the manifest changes before."""
        return self.at + pause_seconds(self.attempts, INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)

    def is_waiting(self, version: str, now: float) -> bool:
        return version == self.version and now < self.until

    def following(self, before: "RejectedWrite | None") -> "RejectedWrite":
        """This rejection, counted after an earlier one of the same manifest."""
        return self if before is None or before.version != self.version else replace(self, attempts=before.attempts + 1)


def is_owned_by(found: Object, uid: str | None) -> bool:
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences", []))


def may_overwrite(found: Object, manifest: Object) -> bool:
    """Whether a manifest may overwrite an object.

    The object must be owned by the manifest's pipeline, or have the operator's labels and no other owner than an
    earlier pipeline of the same name.
    """
    own = manifest["metadata"]["ownerReferences"][0]
    if is_owned_by(found, own["uid"]):
        return True
    labels, wanted = found["metadata"].get("labels", {}), manifest["metadata"]["labels"]
    owners = found["metadata"].get("ownerReferences", [])
    return all(labels.get(key) == wanted[key] for key in (MANAGED_BY, PIPELINE_LABEL)) and all(
        (owner["kind"], owner["name"]) == (own["kind"], own["name"]) for owner in owners
    )


def not_owned_message(found: Object) -> str:
    ref = ref_of(found)
    hint = "rename or delete it, or rename the pipeline"
    return f"{ref.kind} {ref.name} belongs to {_owner(found)}, not to this pipeline: {hint}"


def objects_written(refused: Mapping[Ref, RejectedWrite]) -> ConditionState:
    """Condition of the writes; the first reason is that of a foreign object."""
    if not refused:
        return ok(OBJECTS_WRITTEN, "AllWritten", "all objects of the pipeline are up to date")
    listed = sorted(refused.values(), key=lambda refusal: (refusal.reason, refusal.ref))
    return failing(OBJECTS_WRITTEN, listed[0].reason, "; ".join(refusal.message for refusal in listed))


def _owner(found: Object) -> str:
    metadata: Mapping[str, Any] = found["metadata"]
    owners = metadata.get("ownerReferences", [])
    owner = next((owner for owner in owners if owner.get("controller")), owners[0] if owners else None)
    if owner is not None:
        return f"{owner['kind']} {owner['name']} (uid {owner['uid']})"
    writer = metadata.get("labels", {}).get(MANAGED_BY)
    writer = writer or next((entry["manager"] for entry in metadata.get("managedFields", []) if "manager" in entry), "")
    return writer or "another owner"
