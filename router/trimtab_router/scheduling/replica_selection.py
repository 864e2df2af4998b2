"""Replica selection: the variant of a batch and the replica that receives it, chosen at dispatch (late binding)."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from trimtab_router.scheduling.replica_slots import ReplicaSlots


class Candidate(Protocol):
    """The part of a replica that selection reads."""

    last_used: int

    @property
    def pending_tokens(self) -> float:
        """Tokens left to prefill, plus one for each generation; without tokens, its batches."""

    @property
    def ready_variants(self) -> frozenset[str]: ...

    @property
    def free(self) -> bool:
        """Whether it can take a batch now."""


MIN_COMPUTE_SECONDS = 0.002
"""Shorter batches are not prefetched: nothing would be gained."""
MARGIN_SECONDS = 0.0005
"""Jitter of a timer on a busy event loop."""

AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def variant_for(ready: frozenset[str], planned: str, current: str) -> str | None:
    """Return the variant of a replica: the planned one, else the current one, else any; None if none is ready."""
    if planned in ready:
        return planned
    if current in ready:
        return current
    return min(ready, default=None)


def effective_variant(replicas: Iterable[Candidate], planned: str, current: str) -> str:
    """Return the variant of the whole stage: the planned one as soon as a ready replica offers it."""
    ready: frozenset[str] = frozenset().union(*(replica.ready_variants for replica in replicas))
    return variant_for(ready, planned, current) or current


def least_loaded(replicas: Sequence[AnyCandidate], planned: str) -> AnyCandidate | None:
    """Return the free replica for the next batch; None if none is free.

    Replicas with the planned variant come first, then those with the fewest pending tokens or batches, then the least
    recently used one.
    """
    return _first([replica for replica in replicas if replica.free], planned)


def _first(candidates: Sequence[AnyCandidate], planned: str) -> AnyCandidate | None:
    if len(candidates) == 1:  # the common case, for every batch
        return candidates[0]
    return min(candidates, key=lambda r: (planned not in r.ready_variants, r.pending_tokens, r.last_used), default=None)


def replica_with_capacity(replicas: Sequence[ReplicaSlots], planned: str, current: str) -> ReplicaSlots | None:
    """Return the replica for an early prefill: it has spare capacity, and its variant supports partial prefill."""
    candidates = (
        replica
        for replica in replicas
        if variant_for(replica.ready_variants, planned, current) in replica.partial_prefill
    )
    return _first([replica for replica in candidates if replica.has_spare_capacity], planned)


def expected_free_times(replicas: Sequence[ReplicaSlots], now: float) -> list[float]:
    """Return the expected time at which each ready replica is free, ascending."""
    return sorted(_expected_free_time(replica, now) for replica in replicas if replica.ready_variants)


def _expected_free_time(replica: ReplicaSlots, now: float) -> float:
    if replica.computing is None:
        return now
    start = max(replica.computing.dispatched_at, replica.completed_at)
    held = [batch for batch in (replica.computing, replica.prefetched) if batch is not None]
    return max(start + sum(batch.point.seconds(batch.rows) for batch in held), now)


def prefetch_time(dispatched_at: float, completed_at: float, compute_seconds: float, transfer_seconds: float) -> float:
    """Return when to send the next batch, so that it arrives as its replica becomes free.

    Only full batches are prefetched. No row could have joined them anyway, so binding stays late, and the replica does
    not idle while outputs and the next batch are transferred.

    Args:
        dispatched_at: of the current batch.
        completed_at: of the replica's previous batch; before `dispatched_at` if the current one found it idle.
        compute_seconds: expected for the current batch.
        transfer_seconds: of a batch to the replica and back.
    """
    if compute_seconds < MIN_COMPUTE_SECONDS:
        return float("inf")
    start = dispatched_at if completed_at <= dispatched_at else completed_at - transfer_seconds
    return start + compute_seconds - max(MARGIN_SECONDS, transfer_seconds)
