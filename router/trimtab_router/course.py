"""The course of a request through the stages: what of it is where, what runs next, and how it ends. Pure.

A journey ends exactly once, with all it asked for or with a refusal, and takes what is left of it out of every queue
when it does. The router's requests and the simulator's take the same course.
"""

from collections.abc import Callable, Mapping, Sequence

from trimtab_protocol.extensions import EXPECTED_ACCURACY, parameters_of
from trimtab_protocol.tensors import Array
from trimtab_router.graph import Graph, Walk
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.stage.desk import Desk
from trimtab_router.stage.ports import Clock
from trimtab_router.stage.work import Served, Work


class Course:
    """The desks of a pipeline's stages, in the order of its DAG."""

    def __init__(self, graph: Graph, desks: Mapping[str, Desk], clock: Clock) -> None:
        self.desks = desks
        self._clock = clock
        for name, desk in desks.items():
            desk.followed_by([desks[follower] for follower in graph.following(name)])

    def advance(self, journey: "Journey") -> None:
        """Queue whatever became runnable; end the journey once nothing is left."""
        if journey.over:
            return
        now, walk = self._clock.now, journey.walk
        for runnable in walk.advance():
            desk = self.desks[runnable.stage]
            work = Work(journey, runnable, deadline=journey.deadline, now=now)
            refusal = desk.refusal_of(work, now)
            if refusal is not None:
                journey.work_refused(refusal)
                return
            journey.works[runnable.stage] = work
            desk.take(work)
        if walk.finished and journey.served:
            journey.end()
        elif walk.finished:
            given = ", ".join(walk.inputs)
            journey.work_refused(invalid(f"no stage can run on the inputs given ({given}); send the optional ones too"))

    def withdraw(self, works: Mapping[str, Work]) -> None:
        """Free what is left of these, by stage."""
        for stage, work in works.items():
            self.desks[stage].withdraw(work)


class Journey:
    """The state of one request.

    Args:
        course: what it goes through.
        walk: where it stands in the DAG.
        deadline: absolute, in seconds of the course's clock.
        arrived_at: the same.
        ended: called once, when it ends; `refusal` says how.
        hold: told of the bytes of each stage's outputs, which are kept until the journey ends; None if nobody asks.
        request_id: passed on as `x-request-id`.
        trace_parent: passed on as `traceparent`.
    """

    __slots__ = (
        "_course",
        "_ended",
        "_hold",
        "arrived_at",
        "deadline",
        "over",
        "refusal",
        "request_id",
        "rows_by_stage",
        "served",
        "trace_parent",
        "walk",
        "works",
    )

    def __init__(  # noqa: PLR0913 - all that is known of a request
        self,
        course: Course,
        walk: Walk,
        *,
        deadline: float,
        arrived_at: float,
        ended: "Callable[[Journey], None]",
        hold: Callable[[int], None] | None = None,
        request_id: str = "",
        trace_parent: str = "",
    ) -> None:
        self.walk = walk
        self.deadline = deadline
        self.arrived_at = arrived_at
        self.request_id = request_id
        self.trace_parent = trace_parent
        self.over = False
        self.refusal: Refusal | None = None
        """Why it ended without a result."""
        self.works: dict[str, Work] = {}
        self.served: dict[str, Sequence[Served]] = {}
        self.rows_by_stage: dict[str, int] = {}
        self._course = course
        self._ended = ended
        self._hold = hold

    def work_completed(self, work: Work, outputs: Mapping[str, Array], served: Sequence[Served]) -> None:
        """Go on after a stage."""
        del self.works[work.stage]
        self.served[work.stage] = served
        self.rows_by_stage[work.stage] = work.rows
        if self._hold is not None:
            self._hold(sum(array.nbytes for array in outputs.values()))
        self.walk.complete(work.stage, outputs)
        self._course.advance(self)

    def work_refused(self, refusal: Refusal) -> None:
        """End without a result."""
        if not self.over:
            self.refusal = refusal
            self.end()

    def end(self) -> None:
        """End, and say so."""
        self.leave()
        self._ended(self)

    def leave(self) -> None:
        """Nobody waits for it any more: free what it still has in queues."""
        self.over = True
        self._course.withdraw(self.works)
        self.works = {}

    @property
    def accuracy(self) -> float:
        """Expected accuracy of what served it: the product over its stages, the mean over a stage's rows."""
        product = 1.0
        for stage, pieces in self.served.items():
            product *= sum(piece.rows * piece.accuracy for piece in pieces) / self.rows_by_stage[stage]
        return product

    def parameters(self) -> dict[str, str | int | float]:
        """What served it, for the answer: each stage's variant and how; of several batches the slowest."""
        told: dict[str, str | int | float] = {}
        for stage, pieces in self.served.items():
            slowest = max(pieces, key=lambda piece: piece.queue_seconds + piece.service_seconds)
            named = parameters_of(stage)
            told[named.variant] = slowest.variant
            told[named.operating_point] = slowest.operating_point
            told[named.batch_size] = slowest.batch_rows
            told[named.queue_seconds] = round(slowest.queue_seconds, 6)
            told[named.service_seconds] = round(slowest.service_seconds, 6)
        told[EXPECTED_ACCURACY] = round(self.accuracy, 6)
        return told
