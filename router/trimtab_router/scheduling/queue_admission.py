"""Queue admission and expiry: requests that a stage cannot serve in time are rejected, or dropped from its queue."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from trimtab_router.refusal import RETRY_SECONDS, Refusal, invalid
from trimtab_router.scheduling.interfaces import Callback, Clock
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.policies.interface import (
    NEVER,
    RESPONSE_MARGIN_SECONDS,
    DropPolicy,
    SchedulerView,
    rows_ahead_of,
)
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

ADMISSION_SHARE = 0.8
"""Share of the time to its deadline that a new request may be predicted to need. In overload every admitted request
waits as long as the prediction allows, so without a margin each prediction error would make one late."""


class StageStatus(NamedTuple):
    """Current state of a stage."""

    batch_rows: int
    """Rows of a full batch; 1 if replicas serve rows concurrently."""
    concurrent_batches: int
    """That the ready replicas, or one if none is ready, serve at a time."""
    unready_since: float | None
    """Time since when no replica is ready; None if one is."""
    concurrent_prefills: int
    """The least number of prompts in prefill on any ready replica."""


class QueueAdmission:
    """Admission to the queue of one stage."""

    def __init__(self, queue: DeadlineQueue, latency_model: LatencyModel, drop_policy: DropPolicy) -> None:
        self._stage = latency_model.stage.name
        self._queue = queue
        self._latency_model = latency_model
        self._drop_policy = drop_policy

    def refusal_of(self, request: StageRequest, now: float, status: StageStatus) -> Refusal | None:
        queue = self._queue
        if request.accuracy_floor and not self._latency_model.reaches(request):
            return self._too_inaccurate(request)
        if queue.rows + request.rows > queue.max_rows:
            return self._without_room(request, status)
        if not queue.rows or self._drop_policy != "Predicted" or status.unready_since is not None:
            return None
        return self._predicted_refusal(request, now, status)

    def _without_room(self, request: StageRequest, status: StageStatus) -> Refusal:
        rows, max_rows = self._queue.rows, self._queue.max_rows
        if request.rows > max_rows:
            return invalid(f"stage {self._stage}: {request.rows} rows in one request; send at most {max_rows}")
        seconds = max(self._wait_seconds(rows, status), RETRY_SECONDS)
        message = f"stage {self._stage}: its queue holds {rows} rows of at most {max_rows}; try again later"
        return Refusal("QueueFull", message, stage=self._stage, retry_after_seconds=seconds)

    def drop_reason(self, request: StageRequest, now: float, status: StageStatus) -> Refusal:
        waited_seconds = now - request.enqueued_at
        if status.unready_since is not None:
            message = f"stage {self._stage}: no replica became ready while the request waited {waited_seconds:.3f} s"
            return Refusal("NoReplica", message, stage=self._stage)
        if not self._latency_model.reaches(request):
            return self._too_inaccurate(request)
        if request.deadline <= now:
            message = f"dropped at stage {self._stage}: its deadline passed after {waited_seconds:.3f} s in the queue"
            return Refusal("DeadlineExpired", message, stage=self._stage)
        return self._predicted_late(request, now, 0.0, status)

    def _too_inaccurate(self, request: StageRequest) -> Refusal:
        best = self._latency_model.best_accuracy(request.options.task, request.inputs)
        message = (
            f"stage {self._stage}: its accuracy must be {request.accuracy_floor:.4f} for the floor that the request "
            f"wishes, but no operating point of the plan in force gives more than {best:.4f}; lower the floor"
        )
        return Refusal("AccuracyFloor", message, stage=self._stage)

    def _wait_seconds(self, rows_ahead: float, status: StageStatus) -> float:
        return rows_ahead // status.batch_rows * self._latency_model.occupancy_seconds() / status.concurrent_batches

    def _predicted_refusal(self, request: StageRequest, now: float, status: StageStatus) -> Refusal | None:
        """Return why a request would be dropped later; None if its deadline is within reach.

        It would cost its client time and the queue room. Only rows dispatched before it, and not dropped for it, count.
        """
        alike = not self._queue.special_rows and not request.special
        rows_ahead = self._queue.rows_before(request.due_at) if alike else rows_ahead_of(request, self._queue)
        if not rows_ahead:
            return None
        predicted = self._latency_model.predict(min(request.rows, status.batch_rows), status.concurrent_prefills)
        service = predicted.service_seconds + request.prefill_seconds
        if request.accuracy_floor:
            service = self._service_seconds(request, status)
        wait = rows_ahead // status.batch_rows * predicted.occupancy_seconds / status.concurrent_batches
        if wait + service + predicted.later_seconds <= ADMISSION_SHARE * (request.deadline - now):
            return None
        return self._predicted_late(request, now, wait, status)

    def _service_seconds(self, request: StageRequest, status: StageStatus) -> float:
        rows = min(request.rows, status.batch_rows)
        return self._latency_model.least_seconds(request, rows, status.concurrent_prefills) + request.prefill_seconds

    def _predicted_late(self, request: StageRequest, now: float, wait_seconds: float, status: StageStatus) -> Refusal:
        message = (
            f"dropped at stage {self._stage}: {request.deadline - now:.3f} s are left to its deadline, but it needs "
            f"{wait_seconds:.3f} s in the queue, {self._service_seconds(request, status):.3f} s in this stage and "
            f"{self._latency_model.later_seconds():.3f} s after it"
        )
        return Refusal("DeadlineUnreachable", message, stage=self._stage)


TIMER_SECONDS = 0.0005  # delay of the timer, so that the drop time has passed when it fires
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
        self.unready_since: float | None = clock.now  # since when no replica is ready; None if one is
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
        now, due = view.now, NEVER
        while (head := self._queue.head()) is not None:
            drop_time, grace_ends = view.drop_time(head), self._grace_ends(head)
            if drop_time >= now and grace_ends > now:
                due = min(drop_time, grace_ends)
                break
            self.drop(self._queue.pop(), now)
        if due < self._timer_due:
            self._timer_due = due
            self._clock.call_at(due + TIMER_SECONDS, partial(self._on_timer, due))

    def _on_timer(self, due: float) -> None:
        if due == self._timer_due:
            self._timer_due = NEVER
            self._dispatch()

    def _grace_ends(self, head: RowSlice) -> float:
        if self.unready_since is None:
            return NEVER
        return max(self.unready_since, head.request.enqueued_at) + self._grace_seconds

    def set_response_timers(self, batch: Batch) -> None:
        later_seconds = self._latency_model.later_seconds()
        later_seconds += self._latency_model.reserved_seconds(later_seconds)
        for request in dict.fromkeys(
            row_slice.request for row_slice in batch.row_slices if not row_slice.request.closed
        ):
            due = request.deadline - later_seconds - RESPONSE_MARGIN_SECONDS
            self._clock.call_at(due, partial(self._answer_in_time, request))

    def _answer_in_time(self, request: StageRequest) -> None:
        if not request.closed and request.has_response:
            request.accept_provisional(0, request.rows)
            self._queue.discard(request)
