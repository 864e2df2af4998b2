"""Queue admission: load shedding of requests that a stage could not serve in time, and the reasons of drops."""

from dataclasses import dataclass

from trimtab_pipelines.stages import Stage
from trimtab_router import refusal
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.generation import GenerationTracker
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.policies.drop_order import rows_ahead_of
from trimtab_router.scheduling.policies.interface import DropPolicy
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import StageRequest

ADMISSION_SHARE = 0.8
"""Share of the time to its deadline that a new request may be predicted to need. In overload every admitted request
waits as long as the prediction allows, so without a margin each prediction error would make one late."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """Current state of a stage.

    `unready_since` is the time since when no replica is ready; `concurrent_prefills` is the least of any ready replica.
    """

    batch_size: int
    ready_replicas: int
    unready_since: float | None
    concurrent_prefills: int = 0


class QueueAdmission:
    """Admission to the queue of one stage.

    Args:
        stage: the stage.
        queue: its queue.
        latency_model: of the stage.
        generation: of a generation stage; else None.
        drop_policy: of the pipeline.
        query_of_death: remembers rows that cost replicas; None if rows cannot be distinguished.
    """

    def __init__(
        self,
        stage: Stage,
        queue: DeadlineQueue,
        latency_model: LatencyModel,
        generation: GenerationTracker | None,
        drop_policy: DropPolicy,
        query_of_death: QueryOfDeathDetector | None,
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._latency_model = latency_model
        self._generation = generation
        self._drop_policy = drop_policy
        self._query_of_death = query_of_death

    def refusal_of(self, request: StageRequest, now: float, status: StageStatus) -> Refusal | None:
        """Return why a request is rejected; None if it is admitted."""
        queue, name = self._queue, self._stage.name
        suspected = self._query_of_death.refusal_of(request, now) if self._query_of_death is not None else None
        if suspected is not None:
            return suspected
        if request.accuracy_floor and not self._latency_model.reaches(request):
            return self._too_inaccurate(request)
        if request.rows > queue.max_rows:
            return refusal.too_many_rows(name, request.rows, queue.max_rows)
        if not queue.has_room(request.rows):
            return refusal.queue_full(name, queue.rows, queue.max_rows, self._wait_seconds(queue.rows, status))
        return self._predicted_refusal(request, now, status)

    def drop_reason(self, request: StageRequest, now: float, status: StageStatus) -> Refusal:
        """Return why a queued request is dropped."""
        name, waited_seconds = self._stage.name, now - request.enqueued_at
        if status.unready_since is not None:
            return refusal.no_replica(name, waited_seconds)
        if not self._latency_model.reaches(request):
            return self._too_inaccurate(request)
        if request.deadline <= now:
            return refusal.deadline_passed(name, waited_seconds)
        return self._predicted_late(request, now, 0.0, status)

    def _too_inaccurate(self, request: StageRequest) -> Refusal:
        best = self._latency_model.best_accuracy(request.options.task, request.inputs)
        return refusal.too_inaccurate(self._stage.name, request.accuracy_floor, best)

    def _wait_seconds(self, rows_ahead: float, status: StageStatus) -> float:
        """Return the predicted queueing time behind this many rows."""
        size, replicas = status.batch_size, max(status.ready_replicas, 1)
        if self._generation is not None:  # capacity is freed at the rate at which generations end
            return rows_ahead * self._generation.residence_seconds / (size * replicas)
        return rows_ahead // size * self._latency_model.service_seconds(size) / replicas

    def _predicted_refusal(self, request: StageRequest, now: float, status: StageStatus) -> Refusal | None:
        """Return why a request would be dropped later; None if its deadline is within reach.

        A request that would time out in the queue costs its client time and the queue room. Only rows that are
        dispatched before it, and are not dropped for it, count.
        """
        if self._drop_policy != "Predicted" or status.unready_since is not None:
            return None
        alike = not self._queue.special_rows and not request.special
        rows_ahead = self._queue.rows_before(request.due_at) if alike else rows_ahead_of(request, self._queue)
        if not rows_ahead:
            return None
        wait = self._wait_seconds(rows_ahead, status)
        service = self._service_seconds(request, status)
        if wait + service + self._latency_model.later_seconds() <= ADMISSION_SHARE * (request.deadline - now):
            return None
        return self._predicted_late(request, now, wait, status)

    def _service_seconds(self, request: StageRequest, status: StageStatus) -> float:
        rows = 1 if self._generation is not None else min(request.rows, status.batch_size)
        return self._latency_model.least_seconds(request, rows, status.concurrent_prefills) + request.prefill_seconds

    def _predicted_late(self, request: StageRequest, now: float, wait_seconds: float, status: StageStatus) -> Refusal:
        return refusal.deadline_unreachable(
            self._stage.name,
            request.deadline - now,
            wait_seconds=wait_seconds,
            service_seconds=self._service_seconds(request, status),
            later_seconds=self._latency_model.later_seconds(),
        )
