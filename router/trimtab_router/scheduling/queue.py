"""`DeadlineQueue`: queue of one stage, earliest deadline first, bounded in rows.

Rows of different shapes cannot share a batch, so each shape has a lane; the lane with the most urgent head goes first.
If a batch reads only some inputs, lanes that differ in other inputs are merged.
"""

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import count, islice
from math import inf

from trimtab_router.scheduling.stage_request import RowSlice, Signature, StageRequest

_Entry = tuple[float, float, RowSlice]
_STALE_BEFORE_SWEEP = 64
MAX_SLICES = 4096  # largest number of slices in a batch
_SAMPLED_AT = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


class _Lane(list[_Entry]):
    """Sorted list: moving pointers is cheaper than the comparisons of a heap, and ranks are available."""

    rows = 0


class DeadlineQueue:
    """Row slices by deadline; equal deadlines by arrival."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows = 0
        self.special_rows = 0  # rows that not every operating point may serve, or whose drop rank differs
        self._lanes: dict[Signature, _Lane] = {}
        self._sequence = count()
        self._stale = 0

    def push(self, row_slice: RowSlice) -> None:
        """Add a slice. Check `max_rows` first, except for rows that are retried."""
        request = row_slice.request
        lane = self._lanes.get(request.signature)
        if lane is None:
            lane = self._lanes[request.signature] = _Lane()
        insort(lane, (request.due_at, next(self._sequence), row_slice))
        self._account(lane, request, row_slice.rows)

    def head(self) -> RowSlice | None:
        if len(self._lanes) == 1:  # the common case, several times a batch
            (only,) = self._lanes.values()
            if only and not only[0][2].request.closed:
                return only[0][2]
        lane = self._urgent_lane()
        return lane[0][2] if lane else None

    def sole(self) -> RowSlice | None:
        """Return the head if it is all of the queue."""
        head = self.head()
        return head if head is not None and head.rows == self.rows else None

    def rows_before(self, due_at: float) -> float:
        """Return the rows due by a time: exact if all or none are, else an estimate."""
        if len(self._lanes) == 1:  # the common case
            (lane,) = self._lanes.values()
            return lane.rows * (bisect(lane, (due_at, inf)) / len(lane)) if lane else 0
        return sum([lane.rows * (bisect(lane, (due_at, inf)) / len(lane)) for lane in self._lanes.values() if lane])

    def __iter__(self) -> Iterator[RowSlice]:
        lanes = [lane for lane in self._lanes.values() if lane]
        entries: Iterable[_Entry] = lanes[0] if len(lanes) == 1 else merge(*lanes)
        return (entry[2] for entry in entries if not entry[2].request.closed)

    def only(self, wanted: Callable[[RowSlice], bool]) -> "DeadlineQueue":
        """Return a queue of the wanted slices, to read."""
        part = DeadlineQueue(self.max_rows)
        for signature, lane in self._lanes.items():
            entries = _Lane(entry for entry in lane if not entry[2].request.closed and wanted(entry[2]))
            if entries:
                entries.rows = sum(entry[2].rows for entry in entries)
                part._lanes[signature] = entries
                part.rows += entries.rows
                part.special_rows += sum(entry[2].rows for entry in entries if entry[2].request.special)
        return part

    def batch_candidates(
        self, head: RowSlice, inputs: frozenset[str] | None = None, suits: Callable[[RowSlice], bool] | None = None
    ) -> "BatchCandidates":
        """Return the slices from `head` on that may share a batch. `inputs` None reads all."""
        signature = head.request.signature
        entries: Sequence[_Entry] = self._lanes[signature]
        rows = self._lanes[signature].rows
        if inputs is not None and len(self._lanes) > 1:
            wanted = _signature_read(signature, inputs)
            fitting = [lane for other, lane in self._lanes.items() if _signature_read(other, inputs) == wanted]
            rows = sum(lane.rows for lane in fitting)
            entries = list(merge(*fitting))
        if suits is not None and self.special_rows:
            entries = [entry for entry in entries if not entry[2].request.closed and suits(entry[2])]
            rows = sum(entry[2].rows for entry in entries)
        return BatchCandidates(entries, rows) if entries[0][2] is head else BatchCandidates.behind(entries, rows, head)

    def pop(self) -> RowSlice:
        lane = self._urgent_lane()
        row_slice = lane.pop(0)[2]
        self._account(lane, row_slice.request, -row_slice.rows)
        return row_slice

    def remove(self, row_slices: Iterable[RowSlice]) -> None:
        """Remove these slices; the remaining rows of a split slice keep their position."""
        for row_slice in row_slices:
            request = row_slice.request
            lane = self._lanes[request.signature]
            index = bisect(lane, (request.due_at,))
            while (queued := lane[index][2]).request is not request or queued.start != row_slice.start:
                index += 1
            if row_slice.stop == queued.stop:
                del lane[index]
            else:
                lane[index] = (*lane[index][:2], queued.part(row_slice.stop, queued.stop))
            self._account(lane, request, -row_slice.rows)

    def postpone(self, request: StageRequest, deadline: float) -> None:
        request.set_deadline(deadline)
        if request.queued_rows:
            lane = self._lanes[request.signature]
            lane[:] = sorted((request.due_at, *entry[1:]) if entry[2].request is request else entry for entry in lane)

    def discard(self, request: StageRequest) -> None:
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
        for lane in self._lanes.values():
            lane[:] = [entry for entry in lane if not entry[2].request.closed]
        self._stale = 0


class BatchCandidates:
    """Slices that may be batched together, by deadline. A view of the queue; nothing is copied."""

    __slots__ = ("_entries", "_first", "rows")

    def __init__(self, entries: Sequence[_Entry], rows: int, first: int = 0) -> None:
        self.rows = rows
        self._entries = entries
        self._first = first

    @classmethod
    def behind(cls, entries: Sequence[_Entry], rows: int, head: RowSlice) -> "BatchCandidates":
        first = next((index for index, entry in enumerate(entries) if entry[2] is head), len(entries))
        before = (entry[2] for entry in islice(entries, first))
        return cls(entries, rows - sum(row_slice.rows for row_slice in before if not row_slice.request.closed), first)

    def __iter__(self) -> Iterator[RowSlice]:
        return (entry[2] for entry in islice(self._entries, self._first, None) if not entry[2].request.closed)

    def first(self, rows: int) -> list[RowSlice]:
        """Return the first rows, splitting the last slice; a slice that must run `alone` does."""
        row_slices: list[RowSlice] = []
        for _, _, queued in islice(self._entries, self._first, self._first + MAX_SLICES):
            if queued.request.closed:
                continue
            if row_slices and queued.alone:
                break
            row_slice = queued if queued.rows <= rows else queued.first(rows)
            row_slices.append(row_slice)
            rows -= row_slice.rows
            if queued.alone or rows <= 0:
                break
        return row_slices

    def due(self) -> Iterator[tuple[float, float]]:
        """Yield deadlines at several positions, with the rows due up to each, so that patient rows hide no late ones.

        The first rows are left out: if they are late, they are dropped anyway.
        """
        rest = len(self._entries) - self._first
        for share in _SAMPLED_AT:
            index = min(int(share * rest), rest - 1)
            yield self._entries[self._first + index][0], (index + 1) / rest * self.rows


def _signature_read(signature: Signature, reads: frozenset[str]) -> Signature:
    return tuple(entry for entry in signature if entry[0] in reads)
