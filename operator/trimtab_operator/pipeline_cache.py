"""`PipelineCache`: known objects and rejected writes, by pipeline."""

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.objects import Key, Object, key_of
from trimtab_operator.manifests.objects import OWN_KINDS, Ref, ref_of
from trimtab_operator.reconciliation.leaving_nodes import DELETED, leaving_reason
from trimtab_operator.reconciliation.observed_state import ObservedState
from trimtab_operator.reconciliation.write_errors import RejectedWrite, is_owned_by
from trimtab_pipelines.kubernetes_names import PIPELINE_LABEL


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


def _node(pod: Object) -> str:
    return str(pod["spec"].get("nodeName", ""))


@dataclass(slots=True)
class PipelineCache:
    """Objects by pipeline, rejected writes, and optional kinds of the cluster."""

    objects: Cache[Key] = field(default_factory=lambda: Cache(pipeline_of))
    refused: dict[Key, dict[Ref, RejectedWrite]] = field(default_factory=lambda: defaultdict(dict))
    kinds: frozenset[str] = frozenset()
    leaving: dict[str, str] = field(default_factory=dict)
    """Nodes that are about to go, and why."""

    def put_node(self, node: Object, *, deleted: bool = False) -> set[Key]:
        """Store why a node is about to go; return the pipelines of its pods if that has changed."""
        name, reason = node["metadata"]["name"], DELETED if deleted else leaving_reason(node)
        if self.leaving.get(name, "") == reason:
            return set()
        self.leaving[name] = reason
        affected = {pipeline for pod in self._pods() if _node(pod) == name and (pipeline := pipeline_of(pod))}
        if not reason or (deleted and not affected):
            del self.leaving[name]
        return affected

    def set_nodes(self, nodes: Iterable[Object]) -> None:
        """Store which of all nodes are about to go."""
        reasons = {node["metadata"]["name"]: leaving_reason(node) for node in nodes}
        gone = {name for pod in self._pods() if (name := _node(pod)) in self.leaving and name not in reasons}
        self.leaving = {name: reason for name, reason in reasons.items() if reason} | dict.fromkeys(gone, DELETED)

    def _pods(self) -> Iterable[Object]:
        return (pod for key in self.objects.keys("Pod") if (pod := self.objects.get("Pod", key)))

    def state(self, key: Key) -> tuple[object, ...]:
        """What `observe` returns, without parsing: the same as long as nothing changes but rejected writes."""
        entries = self.objects.entries(key)
        pods = [entry.read() for entry in entries if entry.kind == "Pod"] if self.leaving else ()
        return entries, self.kinds, self._leaving(pods)

    def _leaving(self, pods: Iterable[Object]) -> dict[str, str]:
        return {node: self.leaving[node] for pod in pods if (node := _node(pod)) in self.leaving}

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
        pods = [document for document in objects if document["kind"] == "Pod"]
        return ObservedState(
            pipeline,
            plan=self.get(key, Ref("PipelinePlan", key[1])),
            profiles=[document for document in objects if document["kind"] == "ModelProfile"],
            owned={
                ref_of(document): document
                for document in objects
                if document["kind"] not in {*OWN_KINDS, "Pod"} and is_owned_by(document, uid)
            },
            pods=pods,
            kinds=self.kinds,
            refused=self.refused.get(key, {}),
            leaving=self._leaving(pods),
        )
