"""Which variant runs a batch, and which replica gets it: late binding. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica as the choice sees it."""

    inflight: int
    last_used: int

    @property
    def ready_variants(self) -> frozenset[str]:
        """The variants it can serve now."""

    @property
    def free(self) -> bool:
        """Whether it can take a batch now."""


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def variant_for(ready: frozenset[str], planned: str, current: str) -> str | None:
    """The variant a replica should run: the planned one, else the one in use, else any; None where none is ready."""
    if planned in ready:
        return planned
    if current in ready:
        return current
    return min(ready, default=None)


def effective_variant(replicas: Iterable[Candidate], planned: str, current: str) -> str:
    """The variant a stage as a whole runs: the planned one from the moment a ready replica offers it."""
    ready: frozenset[str] = frozenset().union(*(replica.ready_variants for replica in replicas))
    return variant_for(ready, planned, current) or current


def least_loaded(replicas: Sequence[AnyCandidate], planned: str) -> AnyCandidate | None:
    """The free replica for the next batch; None where none is free.

    Replicas that offer the planned variant come first, then those with fewer batches, then the one unused for longest.
    """
    free = [replica for replica in replicas if replica.free]
    return min(free, key=lambda r: (planned not in r.ready_variants, r.inflight, r.last_used), default=None)
