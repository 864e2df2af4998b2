"""A thin asynchronous shell around the Kubernetes API: server-side apply, and following what changes."""

from trimtab_kubernetes.client import Cluster
from trimtab_kubernetes.errors import ClusterError, Conflict, Gone, NotFound, Rejected, Unreachable
from trimtab_kubernetes.follow import Change, follow
from trimtab_kubernetes.kinds import Kind, kind_of

__all__ = [
    "Change",
    "Cluster",
    "ClusterError",
    "Conflict",
    "Gone",
    "Kind",
    "NotFound",
    "Rejected",
    "Unreachable",
    "follow",
    "kind_of",
]
