"""`SingleFlight`: request coalescing for images. Rows with identical content share one encoding.

A row joins a batch in flight that encodes the same content. It uses no batch capacity; if the batch fails, the row
returns to the queue. If the content was encoded recently, the replica that did so is asked for the stored embedding.
Each row receives a reference of its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_completion import MAX_LOST_REPLICAS, BatchCompletion
from trimtab_router.scheduling.interfaces import Clock, Feature, StatsSink, Transport
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch, BatchFailed, BatchOutcome, Completed, Rejected, ReplicaLost
from trimtab_router.scheduling.stage_request import RowSlice, ServedRows

MAX_PRODUCERS = 16_384
MIN_HIT_SHARE, HIT_WEIGHT, PROBE_EVERY = 0.25, 1 / 16, 32
"""Replicas are asked while the recent hit share is at least this, by a moving average of this weight; else once every
`PROBE_EVERY` times, to notice when they store embeddings again."""


class SingleFlight(Feature):
    """Encodings in flight and at most `max_producers` recent producers of one stage, by a hash of the content."""

    def __init__(
        self,
        transport: Transport,
        queue: DeadlineQueue,
        completion: BatchCompletion,
        *,
        clock: Clock,
        stats: StatsSink,
        wake: Callable[[], None],
        max_producers: int = MAX_PRODUCERS,
    ) -> None:
        self._transport = transport
        self._queue = queue
        self._completion = completion
        self._clock = clock
        self._stats = stats
        self._wake = wake
        self._max_producers = max_producers
        self._in_flight: dict[Hashable, tuple[Batch, int]] = {}
        self._producers: OrderedDict[int, Batch] = OrderedDict()
        self._hit_share = 1.0
        self._skipped_lookups = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def joined_rows(self) -> int:
        return sum(len(batch.joined_rows) for batch in {batch for batch, _ in self._in_flight.values()})

    def join_in_flight(self, row_slice: RowSlice) -> list[RowSlice]:
        """Join rows of a slice to batches in flight; return the others, in order."""
        if not self._in_flight or row_slice.alone:
            return [row_slice]
        return _without_rows(row_slice, [self._join(row_slice, row) for row, _ in _identities(row_slice)])

    def on_enqueue(self, row_slice: RowSlice) -> Sequence[RowSlice]:
        """Return the rows that must be encoded: neither joined nor fetched."""
        unjoined = self.join_in_flight(row_slice)
        return [row for other in unjoined for row in self._fetch(other)] if self._producers else unjoined

    def _fetch(self, row_slice: RowSlice) -> list[RowSlice]:
        return _without_rows(row_slice, [self._fetch_row(row_slice, row) for row, _ in _identities(row_slice)])

    def unique_rows(self, row_slices: Sequence[RowSlice]) -> list[RowSlice]:
        """Return the rows of a new batch, each content once, and queue the others, which join it at its dispatch."""
        seen: set[Hashable] = set()
        unique: list[RowSlice] = []
        for row_slice in row_slices:
            is_duplicate = []
            for row, identity in _identities(row_slice):
                is_duplicate.append(identity in seen)
                if identity in seen:
                    self._queue.push(replace(row_slice, start=row, stop=row + 1))
                seen.add(identity)
            unique += _without_rows(row_slice, is_duplicate)
        return unique

    def on_dispatch(self, batch: Batch) -> None:
        """Register a batch. Queued rows with the same content join it."""
        dispatched: set[Hashable] = set()
        for number, identity in enumerate(_row_identities(batch.row_slices)):
            if identity is not None:
                self._in_flight[identity] = batch, number
                dispatched.add(identity)
        queue = self._queue
        for row_slice in [
            waiting for waiting in queue if any(identity in dispatched for _, identity in _identities(waiting))
        ]:
            queue.remove([row_slice])
            self._push(self.join_in_flight(row_slice))

    def _push(self, row_slices: Sequence[RowSlice]) -> None:
        for row_slice in row_slices:
            self._queue.push(row_slice)

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Remove a batch and complete the rows that joined it, or queue them; remember the producer of its rows."""
        completed = isinstance(outcome, Completed)
        for identity, (other, _) in list(self._in_flight.items()):
            if other is batch:
                del self._in_flight[identity]
                if completed:
                    self._producers[hash(identity)] = replace(batch, row_slices=(), joined_rows=[])
                    self._producers.move_to_end(hash(identity))
        while len(self._producers) > self._max_producers:
            self._producers.popitem(last=False)
        if isinstance(outcome, Completed):
            self._complete_joined(batch, outcome, now)
        else:
            self._return_joined(batch, outcome)

    def _complete_joined(self, batch: Batch, outcome: Completed, now: float) -> None:
        for row_slice, outputs in zip(batch.joined_rows, outcome.shared_outputs, strict=True):
            if outputs is None:
                row_slice.request.identities = ()  # the encoder would store no copy next time either
                self._completion.retry(row_slice, "NotShared", alone=False, attempts=0)
                continue
            dispatched_at = max(batch.dispatched_at, row_slice.request.enqueued_at)
            self._stats.observe_queue_seconds(dispatched_at - row_slice.request.enqueued_at)
            point = self._completion.point_served(batch, outcome).name
            self._complete(row_slice, batch, outputs, dispatched_at, now, point=point, batch_rows=batch.rows)

    def _complete(
        self,
        row_slice: RowSlice,
        producer: Batch,
        outputs: Mapping[str, Array],
        dispatched_at: float,
        now: float,
        *,
        point: str,
        batch_rows: int,
    ) -> None:
        served = ServedRows(
            variant=producer.variant,
            operating_point=point,
            batch_rows=batch_rows,
            queue_seconds=dispatched_at - row_slice.request.enqueued_at,
            service_seconds=now - dispatched_at,
            rows=row_slice.rows,
            accuracy=producer.point.accuracy_for(row_slice.request.options.task),
            dispatched_at=dispatched_at,
        )
        row_slice.request.add_result(row_slice.start, row_slice.rows, outputs, served)

    def _return_joined(self, batch: Batch, outcome: BatchOutcome) -> None:
        """Queue joined rows again. A failure counts once for each of them."""
        at_fault = isinstance(outcome, BatchFailed) or (isinstance(outcome, ReplicaLost) and outcome.delivered)
        alone = batch.rows == 1 and isinstance(outcome, Rejected)
        for row_slice in batch.joined_rows:
            if at_fault and not self._completion.retryable:
                self._completion.fail_not_retryable(row_slice, "it rode along with a batch that failed")
            elif at_fault and row_slice.attempts + 1 >= MAX_LOST_REPLICAS:
                self._completion.fail(row_slice, "replicas failed each time that they served what it shows")
            elif isinstance(outcome, ReplicaLost) and outcome.disconnected and at_fault:
                self._completion.suspects.hold(row_slice, batch, self._clock.now)
            else:
                self._completion.retry(row_slice, "NotShared", alone=alone, attempts=int(at_fault))

    def _join(self, row_slice: RowSlice, row: int) -> bool:
        found = self._in_flight.get(row_slice.request.identities[row])
        if found is None or not self._transport.share(*found):
            return False
        found[0].joined_rows.append(replace(row_slice, start=row, stop=row + 1))
        self._stats.count_deduplicated_row("inflight")
        return True

    def _fetch_row(self, row_slice: RowSlice, row: int) -> bool:
        identity = row_slice.request.identities[row]
        producer = self._producers.get(hash(identity))
        if producer is None or producer.variant not in producer.replica.ready_variants or not self._should_ask():
            return False
        single = replace(row_slice, start=row, stop=row + 1)
        on_fetched = partial(self._on_fetch, single, hash(identity), producer)
        self._transport.fetch(producer.replica, producer.variant, single, on_fetched)
        return True

    def _should_ask(self) -> bool:
        """Return whether asking is worthwhile: without a large enough cache, every call is wasted."""
        if self._hit_share >= MIN_HIT_SHARE:
            return True
        self._skipped_lookups = (self._skipped_lookups + 1) % PROBE_EVERY
        return not self._skipped_lookups

    def _on_fetch(
        self, row_slice: RowSlice, identity_hash: int, producer: Batch, outputs: Mapping[str, Array] | None
    ) -> None:
        self._hit_share += HIT_WEIGHT * ((outputs is not None) - self._hit_share)
        if outputs is not None:
            self._stats.count_deduplicated_row("cache")
        elif self._producers.get(identity_hash) is producer:
            del self._producers[identity_hash]
        if outputs is None:
            self._push([] if row_slice.request.closed else self.join_in_flight(row_slice))
            self._wake()
        else:
            enqueued_at, point = row_slice.request.enqueued_at, producer.point.name
            self._complete(row_slice, producer, outputs, enqueued_at, self._clock.now, point=point, batch_rows=1)


def _identities(row_slice: RowSlice) -> Iterator[tuple[int, Hashable]]:
    return enumerate(row_slice.request.identities[row_slice.start : row_slice.stop], row_slice.start)


def _row_identities(row_slices: Sequence[RowSlice]) -> Iterator[Hashable | None]:
    """Yield the identity of each row; None if unknown or if the request is closed."""
    for row_slice in row_slices:
        identity_hash = row_slice.request.identities
        yield from (identity_hash[row_slice.start : row_slice.stop] if identity_hash else (None,) * row_slice.rows)


def _without_rows(row_slice: RowSlice, out: Sequence[bool]) -> list[RowSlice]:
    if not any(out):
        return [row_slice]
    remaining: list[RowSlice] = []
    start = row_slice.start
    for row, gone in enumerate(out, row_slice.start):
        if gone:
            remaining += [replace(row_slice, start=start, stop=row)] if start < row else []
            start = row + 1
    return [*remaining, replace(row_slice, start=start)] if start < row_slice.stop else remaining
