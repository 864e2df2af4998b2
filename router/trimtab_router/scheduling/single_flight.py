"""Rows that show the same as others: what was made of one does for all, and each gets it under a name of its own.

Where another is on its way they ride along. Who rides is in nobody's way: it takes no room of a batch and no turn of a
replica. It waits no longer than those it rides with, and comes back into the queue where they fail. Where one came back
lately, the replica that made it is asked whether it has it still: another could only make it again. Pure.
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
"""Replicas are asked for what they made while they still have at least such a share of it, where the newest answer has
such a weight; else every so many times, to notice when they do again."""


class SingleFlight:
    """What the replicas of one stage have under way and made lately, by what it shows.

    Args:
        keeper: has what is made of a row kept once more.
        found: is told of each row that a replica was asked for, of the batch that made it, and what it has of it; None
            where it has it no more.
        tally: counts rows that have what was made for others.
        most_homes: rows of which it is remembered who made them; of each a number is kept, not what it shows.
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
        """How many different images are under way."""
        return len(self._in_flight)

    def join_in_flight(self, row_slice: RowSlice) -> list[RowSlice]:
        """Let those rows of a slice ride along that are under way already; returns the others, in order."""
        if not self._in_flight or row_slice.alone:
            return [row_slice]
        return _without_rows(row_slice, [self._join(row_slice, row) for row, _ in _identities(row_slice)])

    def unshared_rows(self, row_slice: RowSlice, *, again: bool) -> list[RowSlice]:
        """What must be made of a slice: neither rides along nor is had from who made it; that is not tried `again`."""
        unjoined = self.join_in_flight(row_slice)
        return unjoined if again or not self._producers else [other for each in unjoined for other in self._fetch(each)]

    def _fetch(self, row_slice: RowSlice) -> list[RowSlice]:
        return _without_rows(row_slice, [self._fetch_row(row_slice, row) for row, _ in _identities(row_slice)])

    def on_dispatch(self, batch: Batch, duplicates: Sequence[RowSlice], queue: DeadlineQueue) -> None:
        """A batch left: rows that were to be in it twice ride along, and so do those that wait in the queue."""
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
        """A batch came back, nobody joins it any more; where its rows were made, its replica may be asked for them."""
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
        """Whether replicas keep what they make: where caches are off or too small each call is for nothing."""
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
    """A batch without its members: who made it, and how."""
    return replace(batch, row_slices=(), joined_rows=[])


def unique_rows(row_slices: Sequence[RowSlice]) -> tuple[list[RowSlice], list[RowSlice]]:
    """The slices of a batch without rows that show the same as earlier ones of it, and those rows."""
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
    """The rows of a slice that are known by what they show; none of one that nobody waits for."""
    return enumerate(row_slice.request.identities[row_slice.start : row_slice.stop], row_slice.start)


def _row_identities(row_slices: Sequence[RowSlice]) -> Iterator[Hashable | None]:
    """Of each row of a batch what it shows; None where that is not known, or nobody waits any more."""
    for row_slice in row_slices:
        identity_hash = row_slice.request.identities
        yield from (identity_hash[row_slice.start : row_slice.stop] if identity_hash else (None,) * row_slice.rows)


def _without_rows(row_slice: RowSlice, out: Sequence[bool]) -> list[RowSlice]:
    """What is left of a slice without some of its rows."""
    if not any(out):
        return [row_slice]
    remaining: list[RowSlice] = []
    start = row_slice.start
    for row, gone in enumerate(out, row_slice.start):
        if gone:
            remaining += [replace(row_slice, start=start, stop=row)] if start < row else []
            start = row + 1
    return [*remaining, replace(row_slice, start=start)] if start < row_slice.stop else remaining
