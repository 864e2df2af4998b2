"""`Expiry`: drops row slices that were not dispatched in time, and returns provisional responses that are due."""

from collections.abc import Callable
from functools import partial

from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.interfaces import Callback, Clock
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.policies.interface import NEVER, RESPONSE_MARGIN_SECONDS, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

TIMER_SECONDS = 0.0005
"""Delay of the timer, so that the drop time has passed when it fires."""
GRACE_SECONDS = 10.0


class Expiry:
    """Expiry of the queue of one stage."""

    def __init__(
        self,
        queue: DeadlineQueue,
        latency_model: LatencyModel,
        clock: Clock,
        *,
        drop_reason: Callable[[StageRequest, float], Refusal],
        dispatch: Callback,
        grace_seconds: float,
    ) -> None:
        self.unready_since: float | None = clock.now
        """Since when no replica is ready; None if one is."""
        self._queue = queue
        self._latency_model = latency_model
        self._clock = clock
        self._drop_reason = drop_reason
        self._dispatch = dispatch
        self._grace_seconds = grace_seconds
        self._timer_due = NEVER

    def set_ready(self, *, some: bool) -> None:
        if some:
            self.unready_since = None
        elif self.unready_since is None:
            self.unready_since = self._clock.now

    def drop(self, row_slice: RowSlice, now: float) -> None:
        """Drop a slice: its request keeps a provisional response if it has one, else it fails."""
        request = row_slice.request
        if row_slice.provisional_response is not None:
            request.accept_provisional(row_slice.start, row_slice.stop)
        elif not request.closed:
            request.owner.on_refused(self._drop_reason(request, now))

    def drop_unreachable(self, view: SchedulerView) -> None:
        while (head := self._queue.head()) is not None and view.drop_time(head) < view.now:
            self.drop(self._queue.pop(), view.now)

    def drop_and_set_timer(self, view: SchedulerView) -> None:
        """Drop slices past their drop time or grace period; set a timer, which replaces the last, for the next."""
        now = view.now
        self.drop_unreachable(view)
        while (head := self._queue.head()) is not None and self._grace_ends(head) <= now:
            self.drop(self._queue.pop(), now)
        if head is None:
            return
        due = min(view.drop_time(head), self._grace_ends(head))
        if due < self._timer_due:
            self._timer_due = due
            self._clock.call_at(max(due, now) + TIMER_SECONDS, partial(self._on_timer, due))

    def _on_timer(self, due: float) -> None:
        if due == self._timer_due:
            self._timer_due = NEVER
            self._dispatch()

    def _grace_ends(self, head: RowSlice) -> float:
        if self.unready_since is None:
            return NEVER
        return max(self.unready_since, head.request.enqueued_at) + self._grace_seconds

    def set_response_timers(self, batch: Batch) -> None:
        """Set timers that return the provisional responses of a batch in time."""
        later_seconds = self._latency_model.later_seconds()
        for request in dict.fromkeys(
            row_slice.request for row_slice in batch.row_slices if not row_slice.request.closed
        ):
            due = request.deadline - later_seconds - RESPONSE_MARGIN_SECONDS
            self._clock.call_at(due, partial(self._answer_in_time, request))

    def _answer_in_time(self, request: StageRequest) -> None:
        if not request.closed and request.has_response:
            request.accept_provisional(0, request.rows)
            self._queue.discard(request)
