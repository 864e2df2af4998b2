"""Which variant runs a batch, and which replica gets it: late binding. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from trimtab_router.scheduling.replica_slots import ReplicaSlots


class Candidate(Protocol):
    """A replica as the choice sees it."""

    last_used: int

    @property
    def pending_tokens(self) -> float:
        """Tokens of prompts it has to read, and one of each answer it writes; of batches, how many it has."""

    @property
    def ready_variants(self) -> frozenset[str]:
        """The variants it can serve now."""

    @property
    def free(self) -> bool:
        """Whether it can take a batch now."""


MIN_COMPUTE_SECONDS = 0.002
"""Batches shorter than this are not sent ahead: there is nothing to gain."""
MARGIN_SECONDS = 0.0005
"""Half a millisecond: what a timer and a busy event loop may be late by."""

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

    Replicas that offer the planned variant come first, then those with fewer batches or, where they write, fewer tokens
    to compute, then the one unused for longest.
    """
    return _first([replica for replica in replicas if replica.free], planned)


def _first(able: Sequence[AnyCandidate], planned: str) -> AnyCandidate | None:
    if len(able) == 1:  # as almost always, and asked for at every batch
        return able[0]
    return min(able, key=lambda r: (planned not in r.ready_variants, r.pending_tokens, r.last_used), default=None)


def replica_with_capacity(replicas: Sequence[ReplicaSlots], planned: str, current: str) -> ReplicaSlots | None:
    """The replica for a row that begins before all it reads is there: a place idles, and its variant can do that."""
    able = (
        replica
        for replica in replicas
        if variant_for(replica.ready_variants, planned, current) in replica.partial_prefill
    )
    return _first([replica for replica in able if replica.has_spare_capacity], planned)


def expected_free_times(replicas: Sequence[ReplicaSlots], now: float) -> list[float]:
    """When each replica that can serve is expected to be free, the first first."""
    return sorted(_free_moment(replica, now) for replica in replicas if replica.ready_variants)


def _free_moment(replica: ReplicaSlots, now: float) -> float:
    if replica.computing is None:
        return now
    begun = max(replica.computing.dispatched_at, replica.completed_at)
    held = [batch for batch in (replica.computing, replica.prefetched) if batch is not None]
    return max(begun + sum(batch.point.seconds(batch.rows) for batch in held), now)


def prefetch_time(departed_at: float, completed_at: float, compute_seconds: float, transfer_seconds: float) -> float:
    """When to send the batch after this one, for it to arrive in the moment its replica becomes free.

    Only a full batch is sent ahead: nobody could have joined it anyway, so binding is as late as before, and the
    replica does not idle while an answer and the next batch travel.

    Args:
        departed_at: when this batch left.
        completed_at: when the replica's batch before it was answered; before `departed_at` where it found it idle.
        compute_seconds: what this batch is expected to take on the replica.
        transfer_seconds: what a batch takes there and back beyond that.
    """
    if compute_seconds < MIN_COMPUTE_SECONDS:
        return float("inf")
    begun = departed_at if completed_at <= departed_at else completed_at - transfer_seconds
    return begun + compute_seconds - max(MARGIN_SECONDS, transfer_seconds)
