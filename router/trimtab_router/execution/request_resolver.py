"""`RequestResolver`: state of a request from its call: tasks, path through the graph, options and deadlines."""

from collections.abc import Callable, Collection
from dataclasses import replace

from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.tasks import TaskTerms
from trimtab_protocol.extensions import TASK
from trimtab_router.execution.executor import PipelineExecutor, RequestState
from trimtab_router.execution.graph import Graph, GraphCursor
from trimtab_router.execution.task_registry import TaskRegistry, require_inputs
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.request import NO_OPTIONS, Call, RequestOptions

MAX_TIMEOUT_SLOS = 10.0  # longest timeout: a later deadline would be served last, and hold memory meanwhile
_ROUNDING = 1e-9


class RequestResolver:
    """Resolves calls of one pipeline. `has_indices`: whether replicas report the indices of tasks."""

    def __init__(
        self, executor: PipelineExecutor, graph: Graph, spec: InferencePipelineSpec, *, has_indices: bool = False
    ) -> None:
        self.tasks = TaskRegistry(spec, executor.schedulers, has_indices=has_indices)
        self._executor = executor
        self._graph = graph
        self._spec = spec
        self._start_seconds = spec.slo.first_response_seconds
        self.max_timeout_seconds = MAX_TIMEOUT_SLOS * spec.slo.latency_seconds

    def resolve(self, call: Call, on_end: Callable[[RequestState], None]) -> RequestState:
        """State of a request. `on_end` is called once. Raises Refusal if the plan cannot grant its options or task."""
        options = call.options
        inputs = call.inputs
        task_stages: Collection[str] = ()
        if options.task:
            needed = [node.name for node in self._graph.needed(call.requested_outputs)]
            inputs, task_stages = self.tasks.resolve(options.task, needed, inputs)
            options = _apply_task_terms(options, self.tasks.terms(options.task))
        cursor = GraphCursor(self._graph, inputs, call.requested_outputs)
        refusal = self._refusal_of(options, cursor, task_stages)
        if refusal is not None:
            raise refusal
        if TASK in call.request.parameters:
            require_inputs(call.request.model_name, self._spec, inputs)
        timeout = self._timeout_seconds(options.timeout_seconds, call.deadline_seconds)
        last_seconds = timeout
        is_whole = call.forwarded is not None and not call.forwarded.route.streams  # it has no early first token
        if self._executor.streaming_stage is not None:
            last_seconds = max(self._spec.slo.latency_seconds, timeout)
        return RequestState(
            self._executor,
            call,
            cursor,
            options,
            task_stages,
            deadline=call.arrived_at + (last_seconds if is_whole else timeout),
            completion_deadline=call.arrived_at + last_seconds,
            on_end=on_end,
        )

    def _timeout_seconds(self, requested: float | None, left_seconds: float | None) -> float:
        """Time limit of a request: the shorter one of client and transport, else the SLO."""
        if requested is None or (left_seconds is not None and left_seconds < requested):
            requested = left_seconds
        return self._start_seconds if requested is None else min(requested, self.max_timeout_seconds)

    def _refusal_of(self, options: RequestOptions, cursor: GraphCursor, task_stages: Collection[str]) -> Refusal | None:
        if options is NO_OPTIONS or options.only_latency:
            return None
        names = self.tasks.names()
        if options.task and not task_stages and options.task not in names:
            known = f"known tasks: {', '.join(names)}" if names else "the current plan has no tasks"
            return invalid(f"unknown task {options.task!r}; {known}")
        best = self._executor.best_accuracy(options, cursor, cursor.remaining_stages)
        required = options.min_accuracy(cursor.rows)
        if required <= best + _ROUNDING:
            return None
        floor = f"an accuracy of {options.accuracy_floor:g}"
        if options.accuracy_probability is not None:
            floor += f" with probability {options.accuracy_probability:g}, which needs {required:.4f} on average,"
        message = f"{floor} is more than the current plan can give; the best possible is {best:.4f}"
        if self._lacks_inputs(cursor):
            message += f" from the inputs given ({', '.join(cursor.inputs)})"
        return Refusal("AccuracyFloor", message)

    def _lacks_inputs(self, cursor: GraphCursor) -> bool:
        stages = [self._executor.schedulers[name].stage for name in cursor.remaining_stages]
        return any(len(cursor.available_inputs(stage)) < len(stage.inputs) for stage in stages)


def _apply_task_terms(options: RequestOptions, task: TaskTerms | None) -> RequestOptions:
    if task is None:
        return options
    timeout_seconds = options.timeout_seconds
    return replace(
        options,
        utility=options.utility * task.utility,
        timeout_seconds=task.latency_seconds if timeout_seconds is None else timeout_seconds,
    )
