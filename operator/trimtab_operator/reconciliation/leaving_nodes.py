"""Nodes that are about to go: cordoned, reclaimed, scaled down or lost."""

from collections.abc import Mapping
from typing import Any

_TAINTS = frozenset(
    {
        "DeletionCandidateOfClusterAutoscaler",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/out-of-service",
        "node.kubernetes.io/unreachable",
    }
)
_TAINT_PREFIX = "aws-node-termination-handler/"
DELETED = "deleted"


def leaving_reason(node: Mapping[str, Any]) -> str:
    """Why a node is about to go; empty if it stays."""
    spec = node.get("spec") or {}
    keys = (str(taint["key"]) for taint in spec.get("taints") or ())
    found = next((key for key in keys if key in _TAINTS or key.startswith(_TAINT_PREFIX)), "")
    return f"taint {found}" if found else "cordoned" if spec.get("unschedulable") else ""
