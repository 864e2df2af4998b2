"""What drives a desk: a clock, whoever carries batches, whoever counts. Router and simulator each have their own."""

from collections.abc import Callable, Mapping
from typing import Protocol

from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import BatchOutcome
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice

Callback = Callable[[], None]
OnChunk = Callable[[Batch, Chunk | LastChunk], None]
PendingArrivals = Callable[[], int | None]
"""How many requests have arrived; None where no more are waited for."""


class Clock(Protocol):
    """Time, and what is to be done in time. Whoever set something decides, once it is due, whether it still matters."""

    @property
    def now(self) -> float:
        """Seconds, from any moment on."""

    def call_at(self, moment: float, act: Callback) -> None:
        """Do something then; soon, where that moment is past."""

    def call_when_idle(self, act: Callback, stir: PendingArrivals) -> None:
        """Do something once all that happens in this moment has happened: once nothing stirs any more."""


class Transport(Protocol):
    """Takes batches to the replicas of a stage."""

    def send(self, batch: Batch, ended: Callable[[Batch, BatchOutcome], None]) -> None:
        """Take a batch to its slot; later, never at once, call `ended` once."""


class StreamingTransport(Transport, Protocol):
    """Takes rows to the replicas of a stage that writes, and brings their answers piece by piece."""

    def stream(self, batch: Batch, wrote: OnChunk, ended: Callable[[Batch, BatchOutcome], None]) -> None:
        """Take a row to its slot; later call `wrote` for each piece, the last one too, and then `ended` once."""

    def send_images(self, batch: Batch, images: Mapping[int, bytes]) -> None:
        """Tell the replica of images that its row still waits for, by their numbers in their chat."""

    def cancel(self, batch: Batch) -> None:
        """Tell the replica at once that nobody waits for a row any more; `ended` is called all the same."""


class EmbeddingTransport(Transport, Protocol):
    """Takes images to replicas that encode them and keep what they made."""

    def share(self, batch: Batch, row: int) -> bool:
        """Have what is made of a row of a batch under way kept once more, for who rides along; False: it is too late.

        The ending tells what became of it, after the batch's own: `Answered.shared`, in the order of these calls.
        """

    def fetch(
        self,
        replica: ReplicaSlots,
        variant: str,
        row_slice: RowSlice,
        came: Callable[[Mapping[str, Array] | None], None],
    ) -> None:
        """Ask a replica that made this row before whether it has it still; later, never at once, call `came` once.

        It is told what became of the row, or None.
        """

    def release(self, references: Array) -> None:
        """Have what was made of some images kept no longer: nobody will pull it."""


class StatsSink(Protocol):
    """Counts what becomes of batches."""

    def observe_queue_seconds(self, seconds: float) -> None:
        """A slice was served, after so long in the queue."""

    def observe_batch(self, key: Key, rows: int, seconds: float, ratio: float) -> None:
        """A batch was served by a variant at a point; `ratio` is observed over profiled time, as of late."""

    def count_escalated_rows(self, rows: int) -> None:
        """Rows with an answer go back into the queue for a better one."""

    def count_deduplicated_row(self, source: str) -> None:
        """Count a row that reused another request's encoding: `inflight` or from the `cache`."""

    def count_early_prefill(self) -> None:
        """A row began before all that it reads was there."""

    def count_retry(self, reason: str) -> None:
        """A slice goes back into the queue."""

    def count_cancelled_row(self) -> None:
        """Nobody waits any more for a row that was being written."""

    def record_policy_error(self, error: Exception) -> None:
        """The policy failed, and `urgent_first` decided instead."""

    def record_replica_error(self, message: str) -> None:
        """A replica did not do what it should."""

    def record_request_error(self, request_id: str, message: str) -> None:
        """A request ends for a fault of ours."""
