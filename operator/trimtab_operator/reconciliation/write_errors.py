"""What could not be written, and why: an object that is not ours, or one the cluster refuses or changes. Pure.

Nothing is written over what somebody else made, whoever may create a pipeline of a fitting name. What was refused is
tried again when it has changed, and now and then, later and later: the cause may be gone, and nobody tells of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trimtab_kubernetes.conditions import ConditionState, failing, ok
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import Ref, ref_of
from trimtab_pipelines.backoff import pause_seconds
from trimtab_pipelines.kubernetes_names import MANAGED_BY, PIPELINE_LABEL

Reason = Literal["NotOwned", "FieldNotApplied", "WriteRejected"]
OBJECTS_WRITTEN = "ObjectsWritten"
INITIAL_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RejectedWrite:
    """One object that is not as it should be."""

    ref: Ref
    reason: Reason
    message: str
    stamp: str
    """Which version of it was refused."""
    at: float
    times: int = 1
    """How often in a row."""

    @property
    def until(self) -> float:
        """When to try again, unless it changes before."""
        return self.at + pause_seconds(self.times, INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)

    def waits(self, stamp: str, now: float) -> bool:
        """Whether it is too early to try again."""
        return stamp == self.stamp and now < self.until

    def after(self, before: "RejectedWrite | None") -> "RejectedWrite":
        """This refusal as one more in a row, where the one before was of the same version."""
        return self if before is None or before.stamp != self.stamp else replace(self, times=before.times + 1)


def is_owned_by(found: Object, uid: str | None) -> bool:
    """Whether an object belongs to the pipeline of that uid."""
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences", []))


def may_overwrite(found: Object, manifest: Object) -> bool:
    """Whether a manifest may be written over an object.

    It belongs to the very pipeline of the manifest; or it carries our marks, and belongs to nobody or to an earlier
    pipeline of this name, which is gone: they were left over for this one.
    """
    own = manifest["metadata"]["ownerReferences"][0]
    if is_owned_by(found, own["uid"]):
        return True
    marks, wanted = found["metadata"].get("labels", {}), manifest["metadata"]["labels"]
    owners = found["metadata"].get("ownerReferences", [])
    return all(marks.get(key) == wanted[key] for key in (MANAGED_BY, PIPELINE_LABEL)) and all(
        (owner["kind"], owner["name"]) == (own["kind"], own["name"]) for owner in owners
    )


def not_owned_message(found: Object) -> str:
    """Say whose an object is that stands where one of ours should."""
    ref = ref_of(found)
    cure = "rename or delete it, or name the pipeline otherwise"
    return f"{ref.kind} {ref.name} is not this pipeline's but {_owner(found)}: {cure}"


def field_not_applied(ref: Ref, path: str) -> str:
    """Say what an object does not take, though the cluster took the write."""
    return (
        f"{ref.kind} {ref.name} does not take {path}: the cluster, or a webhook of it, keeps something other than was "
        "sent; see which admission webhooks change it"
    )


def objects_written(refused: Mapping[Ref, RejectedWrite]) -> ConditionState:
    """Judge what was written; those that stand in the way of ours come first."""
    if not refused:
        return ok(OBJECTS_WRITTEN, "AllWritten", "every object of the pipeline is as it should be")
    listed = sorted(refused.values(), key=lambda refusal: (refusal.reason, refusal.ref))
    return failing(OBJECTS_WRITTEN, listed[0].reason, "; ".join(refusal.message for refusal in listed))


def _owner(found: Object) -> str:
    metadata: Mapping[str, Any] = found["metadata"]
    owners = metadata.get("ownerReferences", [])
    owner = next((owner for owner in owners if owner.get("controller")), owners[0] if owners else None)
    if owner is not None:
        return f"that of {owner['kind']} {owner['name']} (uid {owner['uid']})"
    writer = metadata.get("labels", {}).get(MANAGED_BY)
    writer = writer or next((entry["manager"] for entry in metadata.get("managedFields", []) if "manager" in entry), "")
    return f"one that {writer} made" if writer else "somebody else's"
