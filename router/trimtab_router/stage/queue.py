"""The central queue of a stage: earliest deadline first, bounded in rows.

Slices whose rows have different shapes cannot share a batch, so each shape has a lane of its own; the lane whose head
is most urgent goes first. Pure: no clock, no network.
"""

from bisect import bisect, insort
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

    def rows_beside(self, head: Slice) -> int:
        """How many rows could share a batch with this slice, its own included."""
        return self._lane_rows[head.work.signature]

    def rows_before(self, deadline: float) -> float:
        """How many rows are due by this moment: exact if all or none are, else an estimate by slices."""
        return sum(
            self._lane_rows[signature] * (bisect(lane, (deadline, inf)) / len(lane))
            for signature, lane in self._lanes.items()
            if lane
        )

    def deadline_at(self, head: Slice, share: float) -> tuple[float, float]:
        """Of the slices that could share a batch with this one, the deadline at a share of the way to the last one.

        Returns:
            The deadline, and how many rows are due up to it.
        """
        lane = self._lanes[head.work.signature]
        place = min(int(share * len(lane)), len(lane) - 1)
        return lane[place][0], self._lane_rows[head.work.signature] * (place + 1) / len(lane)

    def pop(self) -> Slice:
        """Remove the most urgent slice. Only when `head` is not None."""
        lane = self._urgent_lane()
        piece = lane.pop(0)[2]
        self._account(piece.work, -piece.rows)
        return piece

    def take(self, rows: int) -> list[Slice]:
        """Remove the most urgent slices of one lane, `rows` rows at most; the last one is split where it must be."""
        taken: list[Slice] = []
        lane = self._urgent_lane()
        while lane and rows > 0:
            piece = lane[0][2]
            if piece.work.closed:
                self._drop_stale(lane)
                continue
            if piece.alone and taken:
                break
            deadline, sequence, _ = lane.pop(0)
            if piece.rows > rows:
                rest = Slice(piece.work, piece.start + rows, piece.stop, piece.attempts, piece.alone)
                lane.insert(0, (deadline, sequence, rest))
                piece = Slice(piece.work, piece.start, rest.start, piece.attempts, piece.alone)
            self._account(piece.work, -piece.rows)
            taken.append(piece)
            rows -= piece.rows
            if piece.alone:
                break
        return taken

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
