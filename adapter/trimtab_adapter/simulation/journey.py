"""One simulated request on its way through the router's own graph walk."""

from collections.abc import Callable, Mapping, Sequence

from trimtab_protocol.tensors import Array
from trimtab_router.graph import Walk
from trimtab_router.refusal import Refusal
from trimtab_router.work import Served, Work


class SimulatedJourney:
    """The state of one request; it ends exactly once. Times are seconds of the simulation.

    Args:
        index: its place among the arrivals.
        walk: where it stands in the DAG.
        arrived_at: when it arrived.
        deadline: when it must be answered.
        advance: called when it can go on.
        refused: called when it ends without a result.
    """

    __slots__ = (
        "_advance",
        "_refused",
        "accuracy",
        "arrived_at",
        "deadline",
        "done",
        "index",
        "rows_by_stage",
        "variants",
        "walk",
        "works",
    )
    trace_parent = ""
    request_id = ""

    def __init__(  # noqa: PLR0913, PLR0917 - all that is known of a request
        self,
        index: int,
        walk: Walk,
        arrived_at: float,
        deadline: float,
        advance: "Callable[[SimulatedJourney], None]",
        refused: "Callable[[SimulatedJourney, Refusal], None]",
    ) -> None:
        self.index = index
        self.walk = walk
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.done = False
        self.works: dict[str, Work] = {}
        self.variants: dict[str, str] = {}
        self.rows_by_stage: dict[str, int] = {}
        self.accuracy = 1.0
        self._advance = advance
        self._refused = refused

    def work_completed(self, work: Work, outputs: Mapping[str, Array], served: Sequence[Served]) -> None:
        """Go on after a stage; accuracy is the product over stages, the mean over a stage's batches."""
        del self.works[work.stage]
        self.accuracy *= sum(piece.accuracy for piece in served) / len(served)
        self.variants[work.stage] = served[0].variant
        self.rows_by_stage[work.stage] = work.rows
        self.walk.complete(work.stage, outputs)
        self._advance(self)

    def work_refused(self, refusal: Refusal) -> None:
        """End without a result."""
        if not self.done:
            self._refused(self, refusal)
