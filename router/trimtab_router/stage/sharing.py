"""Rows that show the same as others on their way: they ride along, and each gets what was made under a name of its own.

Who rides is in nobody's way: it takes no room of a batch and no turn of a replica. It waits no longer than those it
rides with, and comes back into the queue where they fail. Pure.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from trimtab_router.stage.ports import Keeper
from trimtab_router.stage.queue import DeadlineQueue
from trimtab_router.stage.slot import Parcel
from trimtab_router.stage.work import Slice


class Sharing:
    """What the replicas of one stage have under way, by what it shows.

    Args:
        keeper: has what is made of a row kept once more.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._under_way: dict[Hashable, tuple[Parcel, int]] = {}

    def __len__(self) -> int:
        """How many different images are under way."""
        return len(self._under_way)

    def ride(self, piece: Slice) -> list[Slice]:
        """Let those rows of a slice ride along that are under way already; returns the others, in order."""
        if not self._under_way or piece.alone:
            return [piece]
        rides = [self._rides(piece, row) for row, _ in _identities(piece)]
        return _without(piece, rides) if any(rides) else [piece]

    def departed(self, parcel: Parcel, doubles: Sequence[Slice], queue: DeadlineQueue) -> None:
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

    def ended(self, parcel: Parcel) -> None:
        """A batch came back; nobody joins it any more."""
        for identity in _of_all(parcel.batch):
            if self._under_way.get(identity, (None, 0))[0] is parcel:
                del self._under_way[identity]

    def _rides(self, piece: Slice, row: int) -> bool:
        found = self._under_way.get(piece.work.identities[row])
        if found is None or not self._keeper.share(*found):
            return False
        found[0].riders.append(replace(piece, start=row, stop=row + 1))
        return True


def once_each(batch: Sequence[Slice]) -> tuple[list[Slice], list[Slice]]:
    """The slices of a batch without rows that show the same as earlier ones of it, and those rows."""
    seen: set[Hashable] = set()
    kept: list[Slice] = []
    doubles: list[Slice] = []
    for piece in batch:
        double = []
        for _, identity in _identities(piece):
            double.append(identity in seen)
            seen.add(identity)
        kept += _without(piece, double) if any(double) else [piece]
        doubles += [replace(piece, start=row, stop=row + 1) for row, twice in enumerate(double, piece.start) if twice]
    return kept, doubles


def _identities(piece: Slice) -> Iterator[tuple[int, Hashable]]:
    """The rows of a slice that are known by what they show; none of one that nobody waits for."""
    return enumerate(piece.work.identities[piece.start : piece.stop], piece.start)


def _of_all(batch: Sequence[Slice]) -> Iterator[Hashable | None]:
    """Of each row of a batch what it shows; None where that is not known, or nobody waits any more."""
    for piece in batch:
        known = piece.work.identities
        yield from (known[piece.start : piece.stop] if known else (None,) * piece.rows)


def _without(piece: Slice, out: Sequence[bool]) -> list[Slice]:
    """What is left of a slice without some of its rows."""
    left: list[Slice] = []
    start = piece.start
    for row, gone in enumerate(out, piece.start):
        if gone:
            left += [replace(piece, start=start, stop=row)] if start < row else []
            start = row + 1
    return [*left, replace(piece, start=start)] if start < piece.stop else left
