"""Interfaces of a stage scheduler: clock, transport and statistics, for the router and the simulator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView
from trimtab_router.scheduling.replica_selection import ReplicaSelection
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, ReplicaSlots
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

Callback = Callable[[], None]
OnChunk = Callable[[Batch, Chunk | LastChunk], None]
OnEnd = Callable[[Batch, BatchOutcome], None]
PendingArrivals = Callable[[], int | None]  # number of arrivals so far; None if dispatch need not wait for more


class Clock(Protocol):
    """Monotonic time and timers. A callback checks itself whether it still applies."""

    @property
    def now(self) -> float:
        """Seconds since any fixed time."""

    def call_at(self, time: float, callback: Callback) -> None: ...

    def call_when_idle(self, callback: Callback, pending: PendingArrivals) -> None:
        """Run a callback once `pending` no longer changes, after everything else that happens now."""


class Transport(Protocol):
    """Sends the batches of a stage of any role to its replicas, and stores and fetches embeddings."""

    def send(self, batch: Batch, on_end: OnEnd) -> None:
        """Send a batch to its replica, and call `on_end` once, later."""

    def stream(self, batch: Batch, on_chunk: OnChunk, on_end: OnEnd) -> None:
        """Send a row; call `on_chunk` for each chunk, the last one included, and then `on_end` once."""

    def send_images(self, batch: Batch, images: Mapping[int, bytes]) -> None: ...

    def cancel(self, batch: Batch) -> None:
        """Cancel a row at its replica at once; its `on_end` is still called."""

    def share(self, batch: Batch, row: int) -> bool:
        """Store the embedding of a row in flight once more (`Completed.shared_outputs`); False if it is too late."""

    def fetch(
        self,
        replica: ReplicaSlots,
        variant: str,
        row_slice: RowSlice,
        on_fetched: Callable[[Mapping[str, Array] | None], None],
    ) -> None:
        """Ask a replica for an embedding it may have stored; call `on_fetched` once, later."""

    def release(self, references: Array) -> None: ...


class StatsSink(Protocol):
    """Receives statistics of one stage."""

    def observe_queue_seconds(self, seconds: float) -> None: ...

    def observe_batch(self, key: Key, rows: int, seconds: float, ratio: float) -> None:
        """Count a batch of a variant and point; `ratio` is the recent ratio of observed to profiled service time."""

    def count_escalated_rows(self, first: Key, second: Key, rows: int) -> None:
        """Count rows that a second point served again."""

    def count_low_confidence(self, key: Key, below: float, rows: int, low_rows: int) -> None:
        """Count rows of a point whose confidences were compared to a threshold, and those below it."""

    def count_deduplicated_row(self, source: str) -> None:
        """Count a row that reused an encoding: `source` is `inflight` or `cache`."""

    def count_early_prefill(self) -> None: ...

    def count_retry(self, reason: str) -> None: ...

    def count_cancelled_row(self) -> None: ...

    def record_policy_error(self, error: Exception) -> None:
        """Record a failure of the policy; `EarliestDeadlineFirst` decided instead."""

    def record_replica_error(self, message: str) -> None: ...

    def record_ejection(self, replica: str, reason: str) -> None: ...

    def record_ejection_end(self, replica: str) -> None: ...

    def add_replica(self, replica: str) -> None: ...

    def forget_replica(self, replica: str) -> None: ...

    def record_request_error(self, request_id: str, message: str) -> None: ...


class Dispatcher(Protocol):
    """The part of a stage scheduler that dispatches rows which a feature holds outside of the queue."""

    replicas: list[ReplicaSlots]
    replica_selection: ReplicaSelection
    policy: Policy

    @property
    def variant(self) -> str: ...

    def view(self, variant: str, now: float, replica: ReplicaSlots | None = None) -> SchedulerView: ...

    def dispatch(self, replica: ReplicaSlots, dispatch: Dispatch, now: float, *, early: bool = False) -> None: ...


class Feature:
    """Hooks of a stage scheduler, which do nothing unless they are overridden."""

    @property
    def has_waiting(self) -> bool:
        return False

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:  # noqa: ARG002 - a hook
        return None

    def on_enqueue(self, row_slice: RowSlice) -> Sequence[RowSlice]:
        return (row_slice,)

    def on_dispatch(self, batch: Batch) -> None:
        """Called after a batch is sent."""

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Called before the rows of a batch are completed, retried or failed."""

    def on_idle(self, dispatcher: Dispatcher, now: float) -> None:
        """Called when the queue is empty. May dispatch rows of its own."""


def overrides(feature: Feature, hook: str) -> bool:
    """Return whether a feature overrides a hook, which is not called otherwise."""
    return getattr(type(feature), hook) is not getattr(Feature, hook)
