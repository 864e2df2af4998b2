"""Who may join the queue of a stage, and why others may not or were dropped. Pure."""

from dataclasses import dataclass

from trimtab_pipelines.stages import Stage
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling import rejection_messages
from trimtab_router.scheduling.generation import GenerationTracker
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.policies.drop_order import rows_ahead_of
from trimtab_router.scheduling.policies.interface import DropPolicy
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import StageRequest

DOOR_SHARE = 0.8
"""Of the time to its deadline, what a request may be predicted to need when it joins a queue: in overload all who are
let in wait as long as the prediction allows, and with nothing to spare each error of it would make one of them late."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """How a stage stands: rows of a batch, replicas that could serve, and since when there is none (seconds).

    `beside`: how many prompts the replica reads that reads the fewest.
    """

    batch_size: int
    ready_replicas: int
    unready_since: float | None
    beside: int = 0


class QueueAdmission:
    """The door of one stage's queue.

    Args:
        stage: the stage.
        queue: its queue.
        outlook: what it has learnt.
        writing: rows that it writes; None where it does not.
        drop_policy: the pipeline's.
        suspects: remembers rows that cost replicas; None where rows cannot be told apart.
    """

    def __init__(
        self,
        stage: Stage,
        queue: DeadlineQueue,
        outlook: LatencyModel,
        writing: GenerationTracker | None,
        drop_policy: DropPolicy,
        suspects: QueryOfDeathDetector | None,
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._outlook = outlook
        self._writing = writing
        self._drop_policy = drop_policy
        self._suspects = suspects

    def refusal_of(self, work: StageRequest, now: float, standing: StageStatus) -> Refusal | None:
        """Why this work cannot join the queue; None where it can."""
        queue, name = self._queue, self._stage.name
        suspected = self._suspects.refusal_of(work, now) if self._suspects is not None else None
        if suspected is not None:
            return suspected
        if work.accuracy_floor and not self._outlook.reaches(work):
            return self._too_inaccurate(work)
        if work.rows > queue.max_rows:
            return rejection_messages.too_many_rows(name, work.rows, queue.max_rows)
        if not queue.has_room(work.rows):
            return rejection_messages.queue_full(
                name, queue.rows, queue.max_rows, self._wait_seconds(queue.rows, standing)
            )
        return self._hopeless(work, now, standing)

    def reason_of(self, work: StageRequest, now: float, standing: StageStatus) -> Refusal:
        """Why this work is dropped."""
        name, waited_seconds = self._stage.name, now - work.enqueued_at
        if standing.unready_since is not None:
            return rejection_messages.no_replica(name, waited_seconds)
        if not self._outlook.reaches(work):
            return self._too_inaccurate(work)
        if work.deadline <= now:
            return rejection_messages.deadline_passed(name, waited_seconds)
        return self._predicted_late(work, now, 0.0, standing)

    def _too_inaccurate(self, work: StageRequest) -> Refusal:
        best = self._outlook.best_accuracy(work.wish.task, work.inputs)
        return rejection_messages.too_inaccurate(self._stage.name, work.accuracy_floor, best)

    def _wait_seconds(self, rows_ahead: float, standing: StageStatus) -> float:
        """How long rows will wait that join the queue behind so many."""
        size, replicas = standing.batch_size, max(standing.ready_replicas, 1)
        if self._writing is not None:  # a place becomes free as often as one of all that are held ends
            return rows_ahead * self._writing.held_seconds / (size * replicas)
        return rows_ahead // size * self._outlook.service_seconds(size) / replicas

    def _hopeless(self, work: StageRequest, now: float, standing: StageStatus) -> Refusal | None:
        """Why this work would only be dropped later if it joined the end of the queue; None where it may make it.

        Waiting in vain would cost the caller time and the queue its room. Only the rows ahead of it count, those more
        urgent and worth as much: how patient others are neither helps nor harms it.
        """
        if self._drop_policy != "Predicted" or standing.unready_since is not None:
            return None
        alike = not self._queue.special_rows and not work.special
        rows_ahead = self._queue.rows_before(work.due_at) if alike else rows_ahead_of(work, self._queue)
        if not rows_ahead:
            return None
        wait = self._wait_seconds(rows_ahead, standing)
        service = self._service_seconds(work, standing)
        if wait + service + self._outlook.later_seconds() <= DOOR_SHARE * (work.deadline - now):
            return None
        return self._predicted_late(work, now, wait, standing)

    def _service_seconds(self, work: StageRequest, standing: StageStatus) -> float:
        rows = 1 if self._writing is not None else min(work.rows, standing.batch_size)
        return self._outlook.least_seconds(work, rows, standing.beside) + work.prefill_seconds

    def _predicted_late(self, work: StageRequest, now: float, wait_seconds: float, standing: StageStatus) -> Refusal:
        return rejection_messages.deadline_unreachable(
            work,
            now,
            wait_seconds=wait_seconds,
            service_seconds=self._service_seconds(work, standing),
            later_seconds=self._outlook.later_seconds(),
        )
