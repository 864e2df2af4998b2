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

Found = Callable[[RowSlice, Batch, Mapping[str, Array] | None], None]
MOST_HOMES = 16_384
LEAST_FOUND, FOUND_WEIGHT, PROBE_EVERY = 0.25, 1 / 16, 32
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
        self, keeper: EmbeddingTransport, found: Found, tally: StatsSink, most_homes: int = MOST_HOMES
    ) -> None:
        self._keeper = keeper
        self._found = found
        self._tally = tally
        self._most_homes = most_homes
        self._under_way: dict[Hashable, tuple[Batch, int]] = {}
        self._homes: OrderedDict[int, Batch] = OrderedDict()
        self._found_share = 1.0
        self._unasked = 0

    def __len__(self) -> int:
        """How many different images are under way."""
        return len(self._under_way)

    def ride(self, piece: RowSlice) -> list[RowSlice]:
        """Let those rows of a slice ride along that are under way already; returns the others, in order."""
        if not self._under_way or piece.alone:
            return [piece]
        return _without(piece, [self._rides(piece, row) for row, _ in _identities(piece)])

    def left_of(self, piece: RowSlice, *, again: bool) -> list[RowSlice]:
        """What must be made of a slice: neither rides along nor is had from who made it; that is not tried `again`."""
        riding = self.ride(piece)
        return riding if again or not self._homes else [other for each in riding for other in self._fetch(each)]

    def _fetch(self, piece: RowSlice) -> list[RowSlice]:
        return _without(piece, [self._fetches(piece, row) for row, _ in _identities(piece)])

    def departed(self, parcel: Batch, doubles: Sequence[RowSlice], queue: DeadlineQueue) -> None:
        """A batch left: rows that were to be in it twice ride along, and so do those that wait in the queue."""
        shown: set[Hashable] = set()
        for number, identity in enumerate(_of_all(parcel.batch)):
            if identity is not None:
                self._under_way[identity] = parcel, number
                shown.add(identity)
        for double in doubles:
            for left in self.ride(double):
                queue.push(left)
        for piece in [waiting for waiting in queue if any(identity in shown for _, identity in _identities(waiting))]:
            queue.remove([piece])
            for left in self.ride(piece):
                queue.push(left)

    def ended(self, parcel: Batch, *, made: bool) -> None:
        """A batch came back, nobody joins it any more; where its rows were made, its replica may be asked for them."""
        for identity, (other, _) in list(self._under_way.items()):
            if other is parcel:
                del self._under_way[identity]
                if made:
                    self._homes[hash(identity)] = _home(parcel)
                    self._homes.move_to_end(hash(identity))
        while len(self._homes) > self._most_homes:
            self._homes.popitem(last=False)

    def _rides(self, piece: RowSlice, row: int) -> bool:
        found = self._under_way.get(piece.work.identities[row])
        if found is None or not self._keeper.share(*found):
            return False
        found[0].riders.append(replace(piece, start=row, stop=row + 1))
        self._tally.shared("inflight")
        return True

    def _fetches(self, piece: RowSlice, row: int) -> bool:
        identity = piece.work.identities[row]
        home = self._homes.get(hash(identity))
        if home is None or home.variant not in home.slot.ready_variants or not self._worth_asking():
            return False
        one = replace(piece, start=row, stop=row + 1)
        self._keeper.fetch(home.slot, home.variant, one, partial(self._came, one, hash(identity), home))
        return True

    def _worth_asking(self) -> bool:
        """Whether replicas keep what they make: where caches are off or too small each call is for nothing."""
        if self._found_share >= LEAST_FOUND:
            return True
        self._unasked = (self._unasked + 1) % PROBE_EVERY
        return not self._unasked

    def _came(self, piece: RowSlice, known: int, home: Batch, outputs: Mapping[str, Array] | None) -> None:
        self._found_share += FOUND_WEIGHT * ((outputs is not None) - self._found_share)
        if outputs is not None:
            self._tally.shared("cache")
        elif self._homes.get(known) is home:
            del self._homes[known]
        self._found(piece, home, outputs)


def _home(parcel: Batch) -> Batch:
    """A batch without its members: who made it, and how."""
    return replace(parcel, batch=(), riders=[])


def unique_rows(batch: Sequence[RowSlice]) -> tuple[list[RowSlice], list[RowSlice]]:
    """The slices of a batch without rows that show the same as earlier ones of it, and those rows."""
    seen: set[Hashable] = set()
    kept: list[RowSlice] = []
    doubles: list[RowSlice] = []
    for piece in batch:
        double = []
        for _, identity in _identities(piece):
            double.append(identity in seen)
            seen.add(identity)
        kept += _without(piece, double)
        doubles += [replace(piece, start=row, stop=row + 1) for row, twice in enumerate(double, piece.start) if twice]
    return kept, doubles


def _identities(piece: RowSlice) -> Iterator[tuple[int, Hashable]]:
    """The rows of a slice that are known by what they show; none of one that nobody waits for."""
    return enumerate(piece.work.identities[piece.start : piece.stop], piece.start)


def _of_all(batch: Sequence[RowSlice]) -> Iterator[Hashable | None]:
    """Of each row of a batch what it shows; None where that is not known, or nobody waits any more."""
    for piece in batch:
        known = piece.work.identities
        yield from (known[piece.start : piece.stop] if known else (None,) * piece.rows)


def _without(piece: RowSlice, out: Sequence[bool]) -> list[RowSlice]:
    """What is left of a slice without some of its rows."""
    if not any(out):
        return [piece]
    left: list[RowSlice] = []
    start = piece.start
    for row, gone in enumerate(out, piece.start):
        if gone:
            left += [replace(piece, start=start, stop=row)] if start < row else []
            start = row + 1
    return [*left, replace(piece, start=start)] if start < piece.stop else left
