"""The central queue of a stage: earliest deadline first, bounded in rows.

Slices whose rows have different shapes cannot share a batch, so each shape has a lane of its own; the lane whose head
is most urgent goes first. Where a batch reads only some inputs, lanes that differ in the others stand beside each other
as one. Pure: no clock, no network.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import count
from math import inf

from trimtab_router.stage.work import Signature, Slice, Work

_Entry = tuple[float, float, Slice]
"""A lane is a sorted list of these: moving pointers costs less than a heap's comparisons, and it knows who is ahead."""
_STALE_BEFORE_SWEEP = 64


class DeadlineQueue:
    """Slices in the order of their deadlines; equal deadlines in the order of arrival."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows = 0
        self._lanes: dict[Signature, list[_Entry]] = {}
        self._lane_rows: dict[Signature, int] = {}
        self._sequence = count()
        self._stale = 0

    def has_room(self, rows: int) -> bool:
        """Whether so many rows fit below the bound."""
        return self.rows + rows <= self.max_rows

    def push(self, piece: Slice) -> None:
        """Add a slice. Callers ask `has_room` first, except for rows that come back from a lost replica."""
        work = piece.work
        lane = self._lanes.setdefault(work.signature, [])
        insort(lane, (work.deadline, next(self._sequence), piece))
        self._account(work, piece.rows)

    def head(self) -> Slice | None:
        """The most urgent slice; None where the queue is empty."""
        lane = self._urgent_lane()
        return lane[0][2] if lane else None

    def rows_before(self, deadline: float) -> float:
        """How many rows are due by this moment: exact if all or none are, else an estimate by slices."""
        return sum(
            self._lane_rows[signature] * (bisect(lane, (deadline, inf)) / len(lane))
            for signature, lane in self._lanes.items()
            if lane
        )

    def __iter__(self) -> Iterator[Slice]:
        """All that waits, most urgent first."""
        lanes = [lane for lane in self._lanes.values() if lane]
        entries: Iterable[_Entry] = lanes[0] if len(lanes) == 1 else merge(*lanes)
        return (entry[2] for entry in entries if not entry[2].work.closed)

    def beside(self, head: Slice, reads: frozenset[str] | None = None) -> "Beside":
        """What may share a batch with a slice at a point that reads these inputs; None: all there are."""
        signature = head.work.signature
        if reads is None or len(self._lanes) == 1:
            return Beside((signature,), self._lanes[signature], self._lane_rows[signature])
        wanted = _read_of(signature, reads)
        fitting = [other for other in self._lanes if _read_of(other, reads) == wanted]
        rows = sum(self._lane_rows[other] for other in fitting)
        return Beside(fitting, list(merge(*(self._lanes[other] for other in fitting))), rows)

    def pop(self) -> Slice:
        """Remove the most urgent slice. Only when `head` is not None."""
        lane = self._urgent_lane()
        piece = lane.pop(0)[2]
        self._account(piece.work, -piece.rows)
        return piece

    def remove(self, pieces: Iterable[Slice]) -> None:
        """Take these out; of a slice whose first rows are taken the others stay where they were."""
        for piece in pieces:
            work = piece.work
            lane = self._lanes[work.signature]
            place = bisect(lane, (work.deadline,))
            while (there := lane[place][2]).work is not work or there.start != piece.start:
                place += 1
            if piece.stop == there.stop:
                del lane[place]
            else:
                rest = Slice(work, piece.stop, there.stop, there.attempts, there.alone)
                lane[place] = (*lane[place][:2], rest)
            self._account(work, -piece.rows)

    def discard(self, work: Work) -> None:
        """Forget all slices of a work and free its rows; `work.close()` comes with it."""
        if work.queued_rows:
            self._account(work, -work.queued_rows)
            self._stale += 1
        work.close()
        if self._stale > _STALE_BEFORE_SWEEP:
            self._sweep()

    def _account(self, work: Work, rows: int) -> None:
        self.rows += rows
        work.queued_rows += rows
        self._lane_rows[work.signature] = self._lane_rows.get(work.signature, 0) + rows

    def _urgent_lane(self) -> list[_Entry]:
        if len(self._lanes) == 1:  # as almost always, and asked for several times a batch
            (only,) = self._lanes.values()
            if only and not only[0][2].work.closed:
                return only
        best: list[_Entry] = []
        for signature, lane in list(self._lanes.items()):
            while lane and lane[0][2].work.closed:
                self._drop_stale(lane)
            if not lane:
                del self._lanes[signature], self._lane_rows[signature]
            elif not best or lane[0] < best[0]:
                best = lane
        return best

    def _drop_stale(self, lane: list[_Entry]) -> None:
        del lane[0]
        self._stale = max(0, self._stale - 1)

    def _sweep(self) -> None:
        """Remove what was discarded, so that callers who leave do not make the queue grow."""
        for lane in self._lanes.values():
            lane[:] = [entry for entry in lane if not entry[2].work.closed]
        self._stale = 0


class Beside:
    """Slices that may share a batch, most urgent first: what a policy sees of a queue. Nothing is copied to make it."""

    __slots__ = ("_entries", "rows", "signatures")

    def __init__(self, signatures: Sequence[Signature], entries: Sequence[_Entry], rows: int) -> None:
        self.signatures = signatures
        self.rows = rows
        self._entries = entries

    def __iter__(self) -> Iterator[Slice]:
        """All of them."""
        return (entry[2] for entry in self._entries if not entry[2].work.closed)

    def deadline_at(self, share: float, after: int = 0) -> tuple[float, float]:
        """The deadline at a share of the way to the last of those after the first so many.

        Returns:
            The deadline, and which share of the slices is due up to it.
        """
        rest = len(self._entries) - after
        place = min(int(share * rest), rest - 1)
        return self._entries[after + place][0], (place + 1) / rest


def _read_of(signature: Signature, reads: frozenset[str]) -> Signature:
    return tuple(entry for entry in signature if entry[0] in reads)
