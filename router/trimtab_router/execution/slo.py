"""How a request begins: what its task grants it, how long it may take, and whether it is taken at all. Pure.

The router's requests and the simulator's begin the same way.
"""

from collections.abc import Collection

from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.tasks import TaskClass
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.request_options import RequestOptions, ServiceTerms, apply_task_terms, earliest_deadline

LONGEST_TIMEOUT_SLOS = 10.0
"""Of the SLO, how long a caller's own deadline may be: one who waits much longer than all others is served last as long
as there are others, and costs memory all that while."""


class SloResolver:
    """Where requests begin their course.

    Args:
        course: what they go through.
        graph: of the pipeline; its variants' tasks are known from the first.
        slo: what is promised to who asks for nothing else.
    """

    def __init__(self, course: PipelineExecutor, graph: Graph, slo: ServiceLevel) -> None:
        self._course = course
        self._start_seconds = slo.start_seconds
        self._slo_seconds = slo.latency_seconds
        self._classes: dict[str, TaskClass] = {
            task.name: task for stage in graph.stages for variant in stage.variants for task in variant.present_tasks
        }

    @property
    def longest_seconds(self) -> float:
        """The most that any request may take."""
        return LONGEST_TIMEOUT_SLOS * self._slo_seconds

    def enrol(self, task: str, grants: TaskClass) -> None:
        """Know what a task that joined grants, unless one of that name grants something already."""
        self._classes.setdefault(task, grants)

    def dismiss(self, task: str) -> None:
        """Forget what a task grants, where no stage knows it any more."""
        if not any(desk.outlook.knows(task) for desk in self._course.desks.values()):
            self._classes.pop(task, None)

    def terms(
        self,
        wish: RequestOptions,
        walk: GraphCursor,
        arrived_at: float,
        within_seconds: float | None = None,
        named: Collection[str] = (),
    ) -> ServiceTerms:
        """On which a request is served from now on.

        Args:
            wish: what it asks for.
            walk: what it brings.
            arrived_at: in seconds of the course's clock.
            within_seconds: what its transport leaves it from then on; None for no bound.
            named: the stages whose models have the task that it names.

        Raises:
            Refusal: the plan in force cannot give what it wishes.
        """
        wish = apply_task_terms(wish, self._classes.get(wish.task))
        asked = earliest_deadline(wish.timeout_seconds, within_seconds)
        timeout = self._start_seconds if asked is None else min(asked, self.longest_seconds)
        refusal = self._course.refusal_of(wish, walk, named)
        if refusal is not None:
            raise refusal
        writes = self._course.teller is not None
        return ServiceTerms(
            wish, arrived_at + timeout, arrived_at + max(self._slo_seconds, timeout) if writes else None
        )
