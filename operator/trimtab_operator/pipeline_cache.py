"""`PipelineCache`: known objects and rejected writes, by pipeline."""

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field

from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.objects import Key, Object, key_of
from trimtab_operator.manifests.objects import Ref, ref_of
from trimtab_operator.reconciliation.observed_state import ObservedState
from trimtab_operator.reconciliation.write_errors import RejectedWrite, is_owned_by
from trimtab_pipelines.kubernetes_names import PIPELINE_LABEL

_CUSTOM_KINDS = {"InferencePipeline", "PipelinePlan", "ModelProfile"}


def pipeline_of(found: Object) -> Key | None:
    metadata, spec = found["metadata"], found.get("spec") or {}
    namespace, name = key_of(found)
    match found["kind"]:
        case "InferencePipeline":
            return namespace, name
        case "PipelinePlan" | "ModelProfile":
            return namespace, str(spec.get("pipeline", name))
        case _:
            label = metadata.get("labels", {}).get(PIPELINE_LABEL)
            return (namespace, label) if label else None


@dataclass(slots=True)
class PipelineCache:
    """Objects by pipeline, rejected writes, and optional kinds of the cluster."""

    objects: Cache[Key] = field(default_factory=lambda: Cache(pipeline_of))
    refused: dict[Key, dict[Ref, RejectedWrite]] = field(default_factory=lambda: defaultdict(dict))
    kinds: frozenset[str] = frozenset()

    def get(self, key: Key, ref: Ref) -> Object | None:
        return self.objects.get(ref.kind, (key[0], ref.name))

    def prune_rejected_writes(self, key: Key, wanted: Container[Ref]) -> None:
        """Remove rejected writes of objects that are no longer wanted."""
        current = {ref: refusal for ref, refusal in self.refused.pop(key, {}).items() if ref in wanted}
        if current:
            self.refused[key] = current

    def observe(self, key: Key) -> ObservedState | None:
        pipeline = self.get(key, Ref("InferencePipeline", key[1]))
        if pipeline is None:
            return None
        uid, objects = pipeline["metadata"].get("uid"), self.objects.group(key)
        return ObservedState(
            pipeline,
            plan=self.get(key, Ref("PipelinePlan", key[1])),
            profiles=[document for document in objects if document["kind"] == "ModelProfile"],
            owned={
                ref_of(document): document
                for document in objects
                if document["kind"] not in {*_CUSTOM_KINDS, "Pod"} and is_owned_by(document, uid)
            },
            pods=[document for document in objects if document["kind"] == "Pod"],
            kinds=self.kinds,
            refused=self.refused.get(key, {}),
        )
