"""What is known of the cluster: the latest version of every object that concerns a pipeline, by pipeline.

Filled by watches, by lists and by the answers to our own writes, in any order: an older version never replaces a newer.
"""

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from trimtab_operator.objects import Object, Ref, ref_of
from trimtab_operator.observed import Observed
from trimtab_operator.refusals import Refusal, is_owned_by
from trimtab_pipelines.cluster import PIPELINE_LABEL

Key = tuple[str, str]
"""Namespace and name of a pipeline."""
_OURS = {"InferencePipeline", "PipelinePlan", "ModelProfile"}


@dataclass(slots=True)
class Store:
    """Objects by pipeline; optional kinds the cluster knows."""

    objects: dict[Key, dict[Ref, Object]] = field(default_factory=lambda: defaultdict(dict))
    refused: dict[Key, dict[Ref, Refusal]] = field(default_factory=lambda: defaultdict(dict))
    kinds: frozenset[str] = frozenset()

    def put(self, found: Object) -> Key | None:
        """Remember an object unless a newer version is known; return the pipeline to look at, if any."""
        key, ref = pipeline_of(found), ref_of(found)
        if key is None:
            return None
        known = self.objects[key].get(ref)
        if known is not None and not _newer(found, known):
            return None
        found["metadata"].pop("managedFields", None)  # half of an object's size, and nobody here reads it
        self.objects[key][ref] = found
        return key

    def remove(self, found: Object) -> Key | None:
        """Forget an object that is gone, unless another of that name has taken its place."""
        key, ref = pipeline_of(found), ref_of(found)
        if key is None:
            return None
        known = self.objects[key].get(ref)
        if known is not None and known["metadata"].get("uid") == found["metadata"].get("uid"):
            del self.objects[key][ref]
        if not self.objects[key]:
            del self.objects[key]
        return key

    def keep_only(self, kind: str, namespaces: Iterable[str] | None, listed: Iterable[Object]) -> set[Key]:
        """Take a complete list of a kind: put what is in it, forget what is not; return what has changed."""
        items = list(listed)
        names = {(item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items}
        gone = [
            found
            for key, objects in self.objects.items()
            if namespaces is None or key[0] in namespaces
            for ref, found in objects.items()
            if ref.kind == kind and (key[0], ref.name) not in names
        ]
        changed = {self.remove(found) for found in gone} | {self.put(item) for item in items}
        return {key for key in changed if key is not None}

    def keep_refusals(self, key: Key, wanted: Container[Ref]) -> None:
        """Forget refusals of what is not wanted any more."""
        kept = {ref: refusal for ref, refusal in self.refused.pop(key, {}).items() if ref in wanted}
        if kept:
            self.refused[key] = kept

    def pipelines(self) -> list[Key]:
        """List the pipelines that exist."""
        return [key for key, objects in self.objects.items() if Ref("InferencePipeline", key[1]) in objects]

    def observe(self, key: Key) -> Observed | None:
        """Return everything known about a pipeline; None where there is none of that name."""
        objects = self.objects.get(key, {})
        pipeline = objects.get(Ref("InferencePipeline", key[1]))
        if pipeline is None:
            return None
        uid = pipeline["metadata"].get("uid")
        return Observed(
            pipeline,
            plan=objects.get(Ref("PipelinePlan", key[1])),
            profiles=[found for ref, found in objects.items() if ref.kind == "ModelProfile"],
            owned={ref: o for ref, o in objects.items() if ref.kind not in {*_OURS, "Pod"} and is_owned_by(o, uid)},
            pods=[found for ref, found in objects.items() if ref.kind == "Pod"],
            kinds=self.kinds,
            refused=self.refused.get(key, {}),
        )


def pipeline_of(found: Object) -> Key | None:
    """Return the pipeline an object belongs to, or None."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    namespace = metadata.get("namespace", "")
    match found["kind"]:
        case "InferencePipeline":
            return namespace, metadata["name"]
        case "PipelinePlan" | "ModelProfile":
            return namespace, str(spec.get("pipeline", metadata["name"]))
        case _:
            name = metadata.get("labels", {}).get(PIPELINE_LABEL)
            return (namespace, name) if name else None


def _newer(found: Object, known: Object) -> bool:
    """Whether `found` is a later version; versions of one server are numbers that grow."""
    return int(found["metadata"].get("resourceVersion", 0)) > int(known["metadata"].get("resourceVersion", 0))
