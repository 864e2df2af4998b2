"""Asynchronous Kubernetes client and controller library."""

from trimtab_kubernetes.client import Cluster
from trimtab_kubernetes.errors import ClusterError, Conflict, Gone, NotFound, Rejected, Unreachable
from trimtab_kubernetes.kinds import Kind, kind_of
from trimtab_kubernetes.watch import Change, list_and_watch

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
    "kind_of",
    "list_and_watch",
]
