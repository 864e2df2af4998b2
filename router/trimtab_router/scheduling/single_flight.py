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
from trimtab_router.scheduling.interfaces import EmbeddingTransport, StatsSink
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice

OnFetched = Callable[[RowSlice, Batch, Mapping[str, Array] | None], None]
MAX_PRODUCERS = 16_384
MIN_HIT_SHARE, HIT_WEIGHT, PROBE_EVERY = 0.25, 1 / 16, 32
"""Replicas are asked while the recent hit share is at least this, by a moving average of this weight; else once every
`PROBE_EVERY` times, to notice when they store embeddings again."""


class SingleFlight:
    """Encodings in flight and recent producers of one stage, by content.

    Args:
        transport: stores an embedding once more, and fetches stored ones.
        on_fetched: receives each fetched row, the batch that produced it, and its outputs or None.
        stats: counts deduplicated rows.
        max_producers: bound of the remembered rows. A hash of each is kept, not its content.
    """

    def __init__(
        self, transport: EmbeddingTransport, on_fetched: OnFetched, stats: StatsSink, max_producers: int = MAX_PRODUCERS
    ) -> None:
        self._transport = transport
        self._on_fetched = on_fetched
        self._stats = stats
        self._max_producers = max_producers
        self._in_flight: dict[Hashable, tuple[Batch, int]] = {}
        self._producers: OrderedDict[int, Batch] = OrderedDict()
        self._hit_share = 1.0
        self._skipped_lookups = 0

    def __len__(self) -> int:
        """Number of different images in flight."""
        return len(self._in_flight)

    @property
    def joined_rows(self) -> int:
        return sum(len(batch.joined_rows) for batch in {batch for batch, _ in self._in_flight.values()})

    def join_in_flight(self, row_slice: RowSlice) -> list[RowSlice]:
        """Join rows of a slice to batches in flight; return the others, in order."""
        if not self._in_flight or row_slice.alone:
            return [row_slice]
        return _without_rows(row_slice, [self._join(row_slice, row) for row, _ in _identities(row_slice)])

    def unshared_rows(self, row_slice: RowSlice, *, again: bool) -> list[RowSlice]:
        """Return the rows of a slice that must be encoded: neither joined nor fetched. With `again`, do not fetch."""
        unjoined = self.join_in_flight(row_slice)
        return unjoined if again or not self._producers else [other for each in unjoined for other in self._fetch(each)]

    def _fetch(self, row_slice: RowSlice) -> list[RowSlice]:
        return _without_rows(row_slice, [self._fetch_row(row_slice, row) for row, _ in _identities(row_slice)])

    def on_dispatch(self, batch: Batch, duplicates: Sequence[RowSlice], queue: DeadlineQueue) -> None:
        """Register a batch. Its duplicates join it, and so do queued rows with the same content."""
        dispatched: set[Hashable] = set()
        for number, identity in enumerate(_row_identities(batch.row_slices)):
            if identity is not None:
                self._in_flight[identity] = batch, number
                dispatched.add(identity)
        for is_duplicate in duplicates:
            for remaining in self.join_in_flight(is_duplicate):
                queue.push(remaining)
        for row_slice in [
            waiting for waiting in queue if any(identity in dispatched for _, identity in _identities(waiting))
        ]:
            queue.remove([row_slice])
            for remaining in self.join_in_flight(row_slice):
                queue.push(remaining)

    def on_batch_end(self, batch: Batch, *, made: bool) -> None:
        """Remove a batch; if its rows were `made`, remember its replica as their producer."""
        for identity, (other, _) in list(self._in_flight.items()):
            if other is batch:
                del self._in_flight[identity]
                if made:
                    self._producers[hash(identity)] = _without_members(batch)
                    self._producers.move_to_end(hash(identity))
        while len(self._producers) > self._max_producers:
            self._producers.popitem(last=False)

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
        self._on_fetched(row_slice, producer, outputs)


def _without_members(batch: Batch) -> Batch:
    """Return a batch without its rows, to remember who encoded them and how."""
    return replace(batch, row_slices=(), joined_rows=[])


def unique_rows(row_slices: Sequence[RowSlice]) -> tuple[list[RowSlice], list[RowSlice]]:
    """Split the slices of a batch into unique rows and duplicates of earlier ones."""
    seen: set[Hashable] = set()
    kept: list[RowSlice] = []
    duplicates: list[RowSlice] = []
    for row_slice in row_slices:
        is_duplicate = []
        for _, identity in _identities(row_slice):
            is_duplicate.append(identity in seen)
            seen.add(identity)
        kept += _without_rows(row_slice, is_duplicate)
        duplicates += [
            replace(row_slice, start=row, stop=row + 1)
            for row, twice in enumerate(is_duplicate, row_slice.start)
            if twice
        ]
    return kept, duplicates


def _identities(row_slice: RowSlice) -> Iterator[tuple[int, Hashable]]:
    """Yield the indices and identities of a slice's rows; none if the request is closed."""
    return enumerate(row_slice.request.identities[row_slice.start : row_slice.stop], row_slice.start)


def _row_identities(row_slices: Sequence[RowSlice]) -> Iterator[Hashable | None]:
    """Yield the identity of each row; None if unknown or if the request is closed."""
    for row_slice in row_slices:
        identity_hash = row_slice.request.identities
        yield from (identity_hash[row_slice.start : row_slice.stop] if identity_hash else (None,) * row_slice.rows)


def _without_rows(row_slice: RowSlice, out: Sequence[bool]) -> list[RowSlice]:
    """Return a slice without some of its rows."""
    if not any(out):
        return [row_slice]
    remaining: list[RowSlice] = []
    start = row_slice.start
    for row, gone in enumerate(out, row_slice.start):
        if gone:
            remaining += [replace(row_slice, start=start, stop=row)] if start < row else []
            start = row + 1
    return [*remaining, replace(row_slice, start=start)] if start < row_slice.stop else remaining
