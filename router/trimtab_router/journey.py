"""One accepted request on its way: what of it is where, and who waits for the answer.

A journey ends exactly once, with an answer or a refusal, and takes what is left of it out of every queue when it does.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from trimtab_protocol.extensions import EXPECTED_ACCURACY, parameters_of
from trimtab_protocol.tensors import Array
from trimtab_router.graph import Walk
from trimtab_router.refusal import Refusal
from trimtab_router.work import Served, Work


class Journey:
    """The state of one request.

    Args:
        walk: where it stands in the DAG.
        deadline: absolute, monotonic seconds.
        arrived_at: monotonic seconds.
        request_id: passed on as `x-request-id`.
        trace_parent: passed on as `traceparent`.
        hold: told of the bytes of each stage's outputs, which are kept until the journey ends.
        advance: called when it can go on.
    """

    __slots__ = (
        "_advance",
        "_hold",
        "arrived_at",
        "deadline",
        "done",
        "request_id",
        "rows_by_stage",
        "served",
        "trace_parent",
        "walk",
        "works",
    )

    def __init__(  # noqa: PLR0913 - all that is known of a request
        self,
        walk: Walk,
        *,
        deadline: float,
        arrived_at: float,
        request_id: str,
        trace_parent: str,
        hold: Callable[[int], None],
        advance: "Callable[[Journey], None]",
    ) -> None:
        self.walk = walk
        self.deadline = deadline
        self.arrived_at = arrived_at
        self.request_id = request_id
        self.trace_parent = trace_parent
        self.done: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        self.works: dict[str, Work] = {}
        self.served: dict[str, Sequence[Served]] = {}
        self.rows_by_stage: dict[str, int] = {}
        self._hold = hold
        self._advance = advance

    @property
    def nothing_ran(self) -> bool:
        """Whether no stage ran and none will."""
        return self.walk.finished and not self.served

    def work_completed(self, work: Work, outputs: Mapping[str, Array], served: Sequence[Served]) -> None:
        """Go on after a stage."""
        del self.works[work.stage]
        self.served[work.stage] = served
        self.rows_by_stage[work.stage] = work.rows
        self._hold(sum(array.nbytes for array in outputs.values()))
        self.walk.complete(work.stage, outputs)
        self._advance(self)

    def work_refused(self, refusal: Refusal) -> None:
        """End without a result."""
        if not self.done.done():
            self.done.set_exception(refusal)

    @property
    def accuracy(self) -> float:
        """Expected accuracy of what served it: the product over its stages, the mean over a stage's batches."""
        product = 1.0
        for pieces in self.served.values():
            product *= sum(piece.accuracy for piece in pieces) / len(pieces)
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
