"""`SloResolver`: deadlines and options of a request, from its parameters, its task and the SLO.

The router and the simulator share this code.
"""

from collections.abc import Collection

from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.tasks import TaskTerms
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.request_options import RequestOptions, ServiceTerms, apply_task_terms, earliest_deadline

MAX_TIMEOUT_SLOS = 10.0
"""Maximum timeout of a request as a multiple of the SLO. A longer one would be served last, and hold memory meanwhile.

"""


class SloResolver:
    """Resolves the service terms of requests.

    Args:
        executor: executor of the pipeline.
        graph: graph of the pipeline, whose variants declare tasks.
        slo: service level of requests without options.
    """

    def __init__(self, executor: PipelineExecutor, graph: Graph, slo: ServiceLevel) -> None:
        self._executor = executor
        self._start_seconds = slo.first_response_seconds
        self._slo_seconds = slo.latency_seconds
        self._task_terms: dict[str, TaskTerms] = {
            task.name: task for stage in graph.stages for variant in stage.variants for task in variant.loaded_tasks
        }

    @property
    def max_timeout_seconds(self) -> float:
        return MAX_TIMEOUT_SLOS * self._slo_seconds

    def register_task(self, task: str, terms: TaskTerms) -> None:
        """Apply the terms of a task, unless a task of that name has terms already."""
        self._task_terms.setdefault(task, terms)

    def unregister_task(self, task: str) -> None:
        """Forget the terms of a task, unless a stage still has it."""
        if not any(scheduler.latency_model.has_task(task) for scheduler in self._executor.schedulers.values()):
            self._task_terms.pop(task, None)

    def resolve(
        self,
        options: RequestOptions,
        cursor: GraphCursor,
        arrived_at: float,
        within_seconds: float | None = None,
        task_stages: Collection[str] = (),
    ) -> ServiceTerms:
        """Service terms of a request.

        Args:
            options: options of the request.
            cursor: position of the request.
            arrived_at: seconds of the executor's clock.
            within_seconds: time limit of the transport, None for none.
            task_stages: stages whose models have the task that it names.

        Raises:
            Refusal: the current plan cannot grant the options.
        """
        options = apply_task_terms(options, self._task_terms.get(options.task))
        requested = earliest_deadline(options.timeout_seconds, within_seconds)
        timeout = self._start_seconds if requested is None else min(requested, self.max_timeout_seconds)
        refusal = self._executor.options_refusal(options, cursor, task_stages)
        if refusal is not None:
            raise refusal
        streams = self._executor.streaming_stage is not None
        return ServiceTerms(
            options, arrived_at + timeout, arrived_at + max(self._slo_seconds, timeout) if streams else None
        )
