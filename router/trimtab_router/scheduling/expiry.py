"""Rows that leave a queue with no batch: too late, without a replica for too long, or answered with what is known.

Pure.
"""

from collections.abc import Callable
from functools import partial

from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.interfaces import Act, Clock
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.policies.interface import ANSWER_SECONDS, NEVER, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

TIMER_SECONDS = 0.0005
"""How long after the moment it waits for the desk looks."""
GRACE_SECONDS = 10.0


class Expiry:
    """What becomes of rows of one stage for which no batch leaves in time.

    Args:
        queue: of the stage.
        outlook: what it has learnt.
        clock: tells the time, and wakes it.
        reason_of: why the rows of a work are dropped.
        look: looks at the queue anew, at the moment from which the next of its rows cannot make it.
        grace_seconds: how long rows are held while no replica is ready.
    """

    def __init__(
        self,
        queue: DeadlineQueue,
        outlook: LatencyModel,
        clock: Clock,
        *,
        reason_of: Callable[[StageRequest, float], Refusal],
        look: Act,
        grace_seconds: float,
    ) -> None:
        self.unready_since: float | None = clock.now
        """Since when no replica could serve; None where one can."""
        self._queue = queue
        self._outlook = outlook
        self._clock = clock
        self._reason_of = reason_of
        self._look = look
        self._grace_seconds = grace_seconds
        self._timer_due = NEVER

    def ready(self, *, some: bool) -> None:
        """Know whether a replica could serve."""
        if some:
            self.unready_since = None
        elif self.unready_since is None:
            self.unready_since = self._clock.now

    def drop(self, piece: RowSlice, now: float) -> None:
        """Let these rows go: with the answer they have, else their request has none."""
        work = piece.work
        if piece.provisional is not None:
            work.accept(piece.start, piece.stop)
        elif not work.closed:
            work.owner.work_refused(self._reason_of(work, now))

    def drop_hopeless(self, view: SchedulerView) -> None:
        """Drop those whose time, by the drop policy, has come."""
        while (head := self._queue.head()) is not None and view.drop_time(head) < view.now:
            self.drop(self._queue.pop(), view.now)

    def drop_late(self, view: SchedulerView) -> None:
        """Drop what can no longer make it, without waiting for a slot to become free; look again when the next cannot.

        Of several timers only the newest, which is the soonest, does anything when it comes.
        """
        now = view.now
        self.drop_hopeless(view)
        while (head := self._queue.head()) is not None and self._grace_ends(head) <= now:
            self.drop(self._queue.pop(), now)
        if head is None:
            return
        due = min(view.drop_time(head), self._grace_ends(head))
        if due < self._timer_due:
            self._timer_due = due
            self._clock.at(max(due, now) + TIMER_SECONDS, partial(self._on_timer, due))

    def _on_timer(self, due: float) -> None:
        if due == self._timer_due:
            self._timer_due = NEVER
            self._look()

    def _grace_ends(self, head: RowSlice) -> float:
        if self.unready_since is None:
            return NEVER
        return max(self.unready_since, head.work.enqueued_at) + self._grace_seconds

    def hold_provisional(self, parcel: Batch) -> None:
        """See that what is looked at again is answered in time with what is known."""
        later_seconds = self._outlook.later_seconds()
        for work in dict.fromkeys(piece.work for piece in parcel.batch if not piece.work.closed):
            due = work.deadline - later_seconds - ANSWER_SECONDS
            self._clock.at(due, partial(self._answer_in_time, work))

    def _answer_in_time(self, work: StageRequest) -> None:
        if not work.closed and work.answered:
            work.accept(0, work.rows)
            self._queue.discard(work)
