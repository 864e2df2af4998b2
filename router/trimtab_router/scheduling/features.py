"""`Feature`: an optional feature of a stage scheduler, which overrides the hooks that it needs."""

from collections.abc import Sequence
from typing import Protocol

from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.batch_outcomes import BatchOutcome
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView
from trimtab_router.scheduling.replica_selection import ReplicaSelection
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest


class Dispatcher(Protocol):
    """The part of a stage scheduler that dispatches rows which a feature holds outside of the queue."""

    replicas: list[ReplicaSlots]
    replica_selection: ReplicaSelection
    policy: Policy

    @property
    def variant(self) -> str: ...

    def view(self, variant: str, now: float, replica: ReplicaSlots | None = None) -> SchedulerView: ...

    def dispatch(
        self, replica: ReplicaSlots, variant: str, dispatch: Dispatch, now: float, *, early: bool = False
    ) -> None: ...


class Feature:
    """Hooks of a stage scheduler, which do nothing unless they are overridden."""

    @property
    def has_waiting(self) -> bool:
        return False

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:  # noqa: ARG002 - a hook
        """Return why a request is rejected; None if this feature admits it."""
        return None

    def on_enqueue(self, row_slice: RowSlice) -> Sequence[RowSlice]:
        """Return the rows that remain to be queued."""
        return (row_slice,)

    def on_dispatch(self, batch: Batch) -> None:
        """Called after a batch is sent."""

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Called before the rows of a batch are completed, retried or failed."""

    def on_idle(self, dispatcher: Dispatcher, now: float) -> None:
        """Called when the queue is empty. May dispatch rows of its own."""
