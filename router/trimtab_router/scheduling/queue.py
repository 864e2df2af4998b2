"""The central queue of a stage: earliest deadline first, bounded in rows.

Slices whose rows have different shapes cannot share a batch, so each shape has a lane of its own; the lane whose head
is most urgent goes first. Where a batch reads only some inputs, lanes that differ in the others stand beside each other
as one. Pure: no clock, no network.
"""

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import count, islice
from math import inf

from trimtab_router.scheduling.stage_request import RowSlice, Signature, StageRequest

_Entry = tuple[float, float, RowSlice]
_STALE_BEFORE_SWEEP = 64
MOST_SLICES = 4096
"""As many slices as the largest batch can have."""
_LOOKED_AT = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


class _Lane(list[_Entry]):
    """Sorted: moving pointers costs less than a heap's comparisons, and it knows who is ahead."""

    rows = 0


class DeadlineQueue:
    """Slices in the order of their deadlines; equal deadlines in the order of arrival."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows = 0
        self.special_rows = 0
        """Rows that not every operating point may serve, or that are worth more or less than others."""
        self._lanes: dict[Signature, _Lane] = {}
        self._sequence = count()
        self._stale = 0

    def has_room(self, rows: int) -> bool:
        """Whether so many rows fit below the bound."""
        return self.rows + rows <= self.max_rows

    def push(self, row_slice: RowSlice) -> None:
        """Add a slice. Callers ask `has_room` first, except for rows that come back from a lost replica."""
        request = row_slice.request
        lane = self._lanes.get(request.signature)
        if lane is None:
            lane = self._lanes[request.signature] = _Lane()
        insort(lane, (request.due_at, next(self._sequence), row_slice))
        self._account(lane, request, row_slice.rows)

    def head(self) -> RowSlice | None:
        """The most urgent slice; None where the queue is empty."""
        lane = self._urgent_lane()
        return lane[0][2] if lane else None

    def rows_before(self, due_at: float) -> float:
        """How many rows are due by this moment: exact if all or none are, else an estimate by slices."""
        return sum([lane.rows * (bisect(lane, (due_at, inf)) / len(lane)) for lane in self._lanes.values() if lane])

    def __iter__(self) -> Iterator[RowSlice]:
        """All that waits, most urgent first."""
        lanes = [lane for lane in self._lanes.values() if lane]
        entries: Iterable[_Entry] = lanes[0] if len(lanes) == 1 else merge(*lanes)
        return (entry[2] for entry in entries if not entry[2].request.closed)

    def batch_candidates(
        self, head: RowSlice, inputs: frozenset[str] | None = None, suits: Callable[[RowSlice], bool] | None = None
    ) -> "BatchCandidates":
        """What may leave with a slice, from it on.

        Args:
            head: the slice.
            reads: the inputs that the batch reads; None for all there are.
            suits: who may be in such a batch; None for all. Only asked where not all wish the same.
        """
        signature = head.request.signature
        entries: Sequence[_Entry] = self._lanes[signature]
        rows = self._lanes[signature].rows
        if inputs is not None and len(self._lanes) > 1:
            wanted = _read_of(signature, inputs)
            fitting = [lane for other, lane in self._lanes.items() if _read_of(other, inputs) == wanted]
            rows = sum(lane.rows for lane in fitting)
            entries = list(merge(*fitting))
        if suits is not None and self.special_rows:
            entries = [entry for entry in entries if not entry[2].request.closed and suits(entry[2])]
            rows = sum(entry[2].rows for entry in entries)
        return BatchCandidates(entries, rows) if entries[0][2] is head else BatchCandidates.behind(entries, rows, head)

    def pop(self) -> RowSlice:
        """Remove the most urgent slice. Only when `head` is not None."""
        lane = self._urgent_lane()
        row_slice = lane.pop(0)[2]
        self._account(lane, row_slice.request, -row_slice.rows)
        return row_slice

    def remove(self, row_slices: Iterable[RowSlice]) -> None:
        """Take these out; of a slice whose first rows are taken the others stay where they were."""
        for row_slice in row_slices:
            request = row_slice.request
            lane = self._lanes[request.signature]
            place = bisect(lane, (request.due_at,))
            while (there := lane[place][2]).request is not request or there.start != row_slice.start:
                place += 1
            if row_slice.stop == there.stop:
                del lane[place]
            else:
                lane[place] = (*lane[place][:2], there.part(row_slice.stop, there.stop))
            self._account(lane, request, -row_slice.rows)

    def postpone(self, request: StageRequest, deadline: float) -> None:
        """Give a work another deadline, and what waits of it the place that it has by that."""
        request.set_deadline(deadline)
        if request.queued_rows:
            lane = self._lanes[request.signature]
            lane[:] = sorted((request.due_at, *entry[1:]) if entry[2].request is request else entry for entry in lane)

    def discard(self, request: StageRequest) -> None:
        """Forget all slices of a work and free its rows; `work.close()` comes with it."""
        if request.queued_rows:
            self._account(self._lanes[request.signature], request, -request.queued_rows)
            self._stale += 1
        request.close()
        if self._stale > _STALE_BEFORE_SWEEP:
            self._sweep()

    def _account(self, lane: _Lane, request: StageRequest, rows: int) -> None:
        self.rows += rows
        lane.rows += rows
        request.queued_rows += rows
        if request.special:
            self.special_rows += rows

    def _urgent_lane(self) -> _Lane:
        if len(self._lanes) == 1:  # as almost always, and asked for several times a batch
            (only,) = self._lanes.values()
            if only and not only[0][2].request.closed:
                return only
        best = _Lane()
        for signature, lane in list(self._lanes.items()):
            while lane and lane[0][2].request.closed:
                self._drop_stale(lane)
            if not lane:
                del self._lanes[signature]
            elif not best or lane[0] < best[0]:
                best = lane
        return best

    def _drop_stale(self, lane: _Lane) -> None:
        del lane[0]
        self._stale = max(0, self._stale - 1)

    def _sweep(self) -> None:
        """Remove what was discarded, so that callers who leave do not make the queue grow."""
        for lane in self._lanes.values():
            lane[:] = [entry for entry in lane if not entry[2].request.closed]
        self._stale = 0


class BatchCandidates:
    """Who may leave together, most urgent first: what a policy sees of a queue. Nothing is copied to make it."""

    __slots__ = ("_entries", "_first", "rows")

    def __init__(self, entries: Sequence[_Entry], rows: int, first: int = 0) -> None:
        self.rows = rows
        self._entries = entries
        self._first = first

    @classmethod
    def behind(cls, entries: Sequence[_Entry], rows: int, head: RowSlice) -> "BatchCandidates":
        """Only from this slice on."""
        first = next((place for place, entry in enumerate(entries) if entry[2] is head), len(entries))
        before = (entry[2] for entry in islice(entries, first))
        return cls(entries, rows - sum(row_slice.rows for row_slice in before if not row_slice.request.closed), first)

    def __iter__(self) -> Iterator[RowSlice]:
        """All of them."""
        return (entry[2] for entry in islice(self._entries, self._first, None) if not entry[2].request.closed)

    def first(self, rows: int) -> list[RowSlice]:
        """The most urgent so many rows; the last slice is split where it must be, and a suspect travels alone."""
        taken: list[RowSlice] = []
        for _, _, there in islice(self._entries, self._first, self._first + MOST_SLICES):
            if there.request.closed:
                continue
            if taken and there.alone:
                break
            row_slice = there if there.rows <= rows else there.first(rows)
            taken.append(row_slice)
            rows -= row_slice.rows
            if there.alone or rows <= 0:
                break
        return taken

    def due(self) -> Iterator[tuple[float, float]]:
        """Deadlines in a few places along the queue, and how many rows are due up to each.

        The most patient cannot hide what those before them suffer. The very first are left out: whoever is hopeless
        there is dropped anyway.
        """
        rest = len(self._entries) - self._first
        for share in _LOOKED_AT:
            place = min(int(share * rest), rest - 1)
            yield self._entries[self._first + place][0], (place + 1) / rest * self.rows


def _read_of(signature: Signature, reads: frozenset[str]) -> Signature:
    return tuple(entry for entry in signature if entry[0] in reads)
