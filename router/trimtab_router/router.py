"""`Router`: serves one pipeline. Admits requests, executes them, and answers each exactly once.

It knows neither protocols nor files: ingress passes requests, and watchers pass plans and endpoints.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from opentelemetry.trace import Tracer

from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import FAILED, RequestOutcome
from trimtab_pipelines.router_state import RouterLoad, RouterState
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TaskRecord
from trimtab_protocol import InferRequest, InferResponse, PendingRequest, ProtocolError, Tensor
from trimtab_protocol.chat.internal_wire import IMAGES, Usage
from trimtab_protocol.extensions import ESCALATION_PENDING, PLAN_GENERATION
from trimtab_protocol.http_client import Tls
from trimtab_protocol.tensors import Array
from trimtab_router.admission.call import Call
from trimtab_router.admission.concurrency_controller import ConcurrencyController
from trimtab_router.admission.concurrency_limit import ConcurrencyLimit, LimitBounds, limit_bounds
from trimtab_router.admission.entry_gate import EntryGate
from trimtab_router.admission.garbage_collection import CollectorPacer
from trimtab_router.admission.memory_budget import MemoryBudget, Reservation
from trimtab_router.admission.tenant import is_slow_to_rewrite, options_inputs, with_tenant
from trimtab_router.admission.validation import VERSION, ValidatedRequest, decode_and_validate, validate_header
from trimtab_router.clock import EventLoopClock
from trimtab_router.execution.executor import ClientContext, RequestState
from trimtab_router.execution.slo import SloResolver
from trimtab_router.factory import create_executor, create_transports
from trimtab_router.limits import Limits, decoded_bytes, decoding_bytes
from trimtab_router.observability.arrivals import ArrivalCounter
from trimtab_router.observability.metrics import Metrics
from trimtab_router.observability.request_accounting import RequestAccounting
from trimtab_router.observability.stage_state import stage_state
from trimtab_router.observability.tracing import record_request
from trimtab_router.refusal import Refusal, malformed
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.task_names import ResolvedTask, missing_task_inputs, resolve_task
from trimtab_router.scheduling.interfaces import Clock, Transport
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.stage_scheduler import StageScheduler
from trimtab_router.scheduling.task_registration import (
    learn_declared_tasks,
    register_task,
    stage_tasks,
    unregister_task,
)
from trimtab_router.transport.token_counts import fetch_token_counts

BODY_SECONDS = 10.0
PATIENCE_SHARE = 0.2
"""Maximum time that a request may wait for admission, as a share of the SLO. The rest must suffice to serve it."""


class Router:
    """Serves one pipeline.

    Args:
        pipeline: pipeline document.
        plan: initial plan. None: each stage starts with its first variant and batches of one row.
        limits: bounds of the process.
        policy: scheduling policy, None for the pipeline's own.
        tracer: writes spans, None for none.
        tls: TLS context of connections to replicas.
        clock: clock of requests and batches, None for the event loop's.
        transports: transport of each stage's batches, None for HTTP to the applied endpoints.
    """

    def __init__(
        self,
        pipeline: InferencePipeline,
        plan: PipelinePlan | None = None,
        *,
        limits: Limits | None = None,
        policy: Policy | None = None,
        tracer: Tracer | None = None,
        tls: Tls = lambda: None,
        clock: Clock | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.limits = limits or Limits()
        self.metrics = Metrics(pipeline.metadata.namespace, pipeline.name, pipeline.spec.slo)
        self.arrivals = ArrivalCounter(time.time())
        self.plan = plan
        self.plan_applied_at = time.time() if plan else None
        self.terminating = False
        """Whether clients should use another router. Requests are still accepted."""
        self.draining = False
        """Whether requests are rejected."""
        self._tracer = tracer
        self._graph = Graph(pipeline.spec)
        self._clock = clock or EventLoopClock()
        self._http = create_transports(self._graph, self.limits, tls) if transports is None else {}
        self._table_builder = ThreadPoolExecutor(1, "prepare")
        self._policy = policy or POLICIES[pipeline.spec.scheduling_policy]
        self._executor = create_executor(
            self._graph,
            pipeline.spec,
            plan,
            policy=self._policy,
            clock=self._clock,
            transports=transports or self._http,
            metrics=self.metrics,
            grace_seconds=self.limits.grace_seconds,
        )
        self.schedulers = self._executor.schedulers
        for scheduler in self.schedulers.values():
            self._prepare_policy(scheduler)
        self._slo_resolver = SloResolver(self._executor, self._graph, pipeline.spec.slo)
        self._output_datatypes = {o.name: self._graph.datatype_of(o.source) for o in pipeline.spec.outputs}
        self._options = options_inputs(pipeline.spec)
        self._entry_gate = EntryGate(PATIENCE_SHARE * pipeline.spec.slo.first_response_seconds)
        limits = self.limits
        self._collector_pacer = CollectorPacer()
        self.memory = MemoryBudget(
            limits.max_bytes_in_flight, limits.max_client_requests, limits.max_client_bytes, self._collector_pacer.soon
        )
        self.concurrency = ConcurrencyController(
            ConcurrencyLimit(pipeline.spec.slo.latency_seconds), self.memory, self._limit_bounds
        )
        self._decoder = ThreadPoolExecutor(1, "decode")  # one thread, which bounds temporary memory too
        self._pending: set[asyncio.Future[None]] = set()
        self.accounting = RequestAccounting(
            self.metrics, self.arrivals, self._clock, pipeline.spec.slo, self.concurrency.note_overload
        )
        self.metrics.plan_generation.set(self.plan_generation)
        self.metrics.arrivals_peak.set_function(lambda: self.arrivals.peak(time.time()))
        self.metrics.bytes_in_flight.set_function(lambda: self.memory.bytes_in_flight)
        self.metrics.requests_in_flight.set_function(lambda: self.memory.requests)
        self.metrics.concurrency_limit.set_function(lambda: self.concurrency.concurrency_limit.limit)

    @property
    def body_seconds(self) -> float:
        """Time limit of a request's body."""
        return self.limits.body_seconds or max(BODY_SECONDS, self.pipeline.spec.slo.latency_seconds)

    @property
    def plan_generation(self) -> int:
        """Generation of the current plan, 0 before the first."""
        return self.plan.spec.generation if self.plan else 0

    @property
    def ready(self) -> bool:
        """Whether the router accepts traffic and every active stage has a replica."""
        return self.accepts_traffic and all(scheduler.ready_replicas for scheduler in self._active_schedulers)

    @property
    def accepts_traffic(self) -> bool:
        """Whether clients should connect here: every active stage has had a replica, and the router is not terminating.

        A stage that has lost its replicas does not change that. All routers would become unready at once, and
        connections would be refused. A router instead queues requests for a while, or rejects them with a retry time.
        """
        return not (self.terminating or self.draining) and all(
            scheduler.had_replica for scheduler in self._active_schedulers
        )

    @property
    def _active_schedulers(self) -> list[StageScheduler]:
        """Schedulers of stages with traffic."""
        return [scheduler for name, scheduler in self.schedulers.items() if name not in self._executor.idle_stages]

    @property
    def max_request_seconds(self) -> float:
        """Time after which every request has been answered or refused."""
        return self._slo_resolver.max_timeout_seconds + self.limits.grace_seconds + self.limits.hang_seconds

    async def infer(self, call: Call) -> InferResponse:
        """Serve a request. Raises Refusal. Cancelling the call removes the request from all queues."""
        self.accounting.count_received(call.arrived_at)
        state: RequestState | None = None
        outcome = FAILED
        refusal: Refusal | None = None
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(ended)
        try:
            state = self._start(call, ended)
            await ended
            if state.refusal is not None:
                raise state.refusal
            self.concurrency.note_response()
            outcome = self.accounting.record_response(state)
            return self._response(call.request, state)
        except Refusal as error:
            refusal = error
            outcome = self.accounting.record_refusal(
                refusal, own_deadline=state is not None and self._has_tighter_deadline(state)
            )
            raise
        except asyncio.CancelledError:
            stage = next(iter(state.stage_requests), "") if state else ""
            refusal = Refusal(ErrorCode.CANCELLED, "Cancelled", "the client disconnected", stage=stage)
            outcome = self.accounting.record_refusal(refusal, own_deadline=self._disconnected_early(call))
            raise
        finally:
            self.accounting.count_outcome(outcome)
            self._pending.discard(ended)
            if state is not None:
                self.accounting.record_stream(state.stream)
                self._finish(state, outcome, refusal)

    async def count_tokens(self, call: Call) -> Usage:
        """Token counts of a chat, without generating. The request does not count as served.

        Raises:
            Refusal: the chat is invalid, or no replica can count.
        """
        return await fetch_token_counts(self._executor, self._http, self._decode_request(call.request).inputs)

    async def admit(self, arrived_at: float, client: str = "") -> Reservation:
        """Admit a request, at its turn of the event loop. It ends with the reservation's context.

        Raises:
            Refusal: overload, or too many requests of its client. Already counted.
        """
        reservation = None
        try:
            self.concurrency.check_capacity()
            reservation = self.memory.reservation(client)
            await self._entry_gate.enter(arrived_at)
        except BaseException as error:
            if reservation is not None:
                reservation.end()
            if isinstance(error, Refusal):
                raise self.accounting.count_rejection(error) from error
            raise
        return reservation

    async def validate(self, pending: PendingRequest, reservation: Reservation) -> ValidatedRequest:
        """Validate a request and decode its tensors, in a thread if that is slow.

        The description is validated before any value is decoded.

        Args:
            pending: the request.
            reservation: grows by the memory that decoding needs.

        Raises:
            Refusal: already counted.
        """
        name, spec = self.pipeline.name, self.pipeline.spec
        try:
            if not (pending.slow or is_slow_to_rewrite(self._options, pending.inputs)):
                return self._decode(pending, reservation.client)
            validate_header(name, spec, pending.request, pending.inputs)
            if self.draining:
                raise _draining_refusal()
            cost = decoding_bytes(pending, reservation.size_bytes)
            reservation.grow(cost)
            loop = asyncio.get_running_loop()
            validated = await loop.run_in_executor(self._decoder, self._decode, pending, reservation.client)
            reservation.record(decoded_bytes(validated) - cost)
        except ProtocolError as error:
            raise self.accounting.count_rejection(malformed(error)) from error
        except Refusal as refusal:
            raise self.accounting.count_rejection(refusal) from refusal
        return validated

    def apply_plan(self, plan: PipelinePlan) -> None:
        """Apply a plan from the next batch on."""
        self.plan = plan
        self.plan_applied_at = time.time()
        self.metrics.plan_generation.set(plan.spec.generation)
        for name, scheduler in self.schedulers.items():
            scheduler.apply_plan(plan.spec.stage(name))
            self._prepare_policy(scheduler)

    def apply_endpoints(self, endpoints: Endpoints) -> None:
        """Use these replicas. Replicas no longer named finish their batches and are closed."""
        for name, transport in self._http.items():
            scheduler = self.schedulers[name]
            scheduler.set_replicas(
                transport.set_endpoints(endpoints.stages.get(name, ()), partial(self._on_replica_change, scheduler))
            )

    def _on_replica_change(self, scheduler: StageScheduler) -> None:
        """Apply a change of a replica's readiness. Its tasks are known at that time."""
        learn_declared_tasks(scheduler, self.pipeline.spec.objective.accuracy_basis)
        scheduler.refresh_replicas()

    def register_task(self, stage: str, variant: str, task: str, record: TaskRecord) -> None:
        """Register a task of a variant at run time."""
        basis = self.pipeline.spec.objective.accuracy_basis
        register_task(self.schedulers[stage], variant, task, record.accuracy_by_point, basis)
        self._slo_resolver.register_task(task, record)

    def unregister_task(self, stage: str, variant: str, task: str) -> None:
        """Unregister a task of a variant, and its service terms unless another variant has it."""
        unregister_task(self.schedulers[stage], variant, task)
        self._slo_resolver.unregister_task(task)

    async def model_metadata(self, stage: str, variant: str) -> dict[str, dict[str, Any]]:
        """Metadata of a variant by the names of its ready replicas."""
        return await self._http[stage].model_metadata(variant) if stage in self._http else {}

    def state(self) -> RouterState:
        now = self._clock.now
        rows_per_request, tokens = (
            self.accounting.rows_per_request.expected(now),
            self.accounting.prompt_tokens.expected(now),
        )
        unauthenticated = {
            name: self._http[name].unauthenticated if name in self._http else {} for name in self.schedulers
        }
        return RouterState(
            plan_generation=self.plan_generation,
            plan_applied_at=self.plan_applied_at,
            ready=self.ready,
            served=self.accounting.recent.summary(now),
            accuracy_sources=accuracy_sources(self.pipeline.spec.stages),
            stages={
                name: stage_state(scheduler, rows_per_request.get(name), tokens.get(name), unauthenticated[name], now)
                for name, scheduler in self.schedulers.items()
            },
        )

    def arrival_history(self, seconds: int) -> RouterLoad:
        """Arrivals of the last whole seconds."""
        now = time.time()
        return RouterLoad(now=now, rps=self.arrivals.history(now, seconds))

    async def drain(self, timeout_seconds: float) -> None:
        """Reject new requests, wait for those in flight, and close all connections."""
        self.draining = True
        if self._pending:
            await asyncio.wait(self._pending, timeout=timeout_seconds)
        await asyncio.gather(*(transport.close() for transport in self._http.values()))
        self.concurrency.close()
        self._collector_pacer.close()
        self._decoder.shutdown(wait=False)  # queued requests are still decoded, and then refused
        self._table_builder.shutdown(wait=False)  # tables in progress are completed: they are shared

    def _prepare_policy(self, scheduler: StageScheduler) -> None:
        """Precompute the policy's tables for the current plan in a thread, so that decisions do not wait."""
        if self._policy.prepare is not None and not self.draining:
            model, variant = scheduler.latency_model, scheduler.plan.variant
            self._table_builder.submit(self._policy.prepare(model.points(variant), model.max_batch_rows(variant)))

    def wait_for_tables(self) -> None:
        """Block until the policy's tables for all applied plans are computed."""
        self._table_builder.submit(int).result()

    def _limit_bounds(self) -> LimitBounds | None:
        """Bounds that the ready replicas set, None while a stage has none."""
        rows = self.accounting.rows_per_request.expected(self._clock.now)
        stages = [
            (scheduler.capacity(), rows.get(scheduler.stage.name) or 1.0) for scheduler in self._active_schedulers
        ]
        return limit_bounds(stages, self.pipeline.spec.slo.latency_seconds, self.pipeline.spec.drop_policy)

    def _decode(self, pending: PendingRequest, client: str) -> ValidatedRequest:
        """Decode a request and set its tenant. Thread-safe."""
        return with_tenant(
            decode_and_validate(self.pipeline.name, self.pipeline.spec, pending), self._options, client=client
        )

    def _decode_request(self, request: InferRequest) -> ValidatedRequest:
        try:
            return decode_and_validate(self.pipeline.name, self.pipeline.spec, PendingRequest.of(request))
        except ProtocolError as error:
            raise malformed(error) from error

    def _start(self, call: Call, ended: asyncio.Future[None]) -> RequestState:
        validated = call.validated or self._decode_request(call.request)
        if self.draining:
            raise _draining_refusal()
        resolved = self._resolve_task(validated.options.task, validated)
        cursor = GraphCursor(self._graph, resolved.inputs, validated.requested_outputs)
        terms = self._slo_resolver.resolve(
            validated.options, cursor, call.arrived_at, call.deadline_seconds, resolved.stages
        )
        missing = missing_task_inputs(self.pipeline.name, self.pipeline.spec, resolved.inputs)
        if missing is not None:
            raise missing
        self.arrivals.record(time.time())
        state = RequestState(
            self._executor,
            cursor,
            terms,
            arrived_at=call.arrived_at,
            on_end=partial(_complete, ended),
            images=_image_count(validated.inputs),
            task_stages=resolved.stages,
            client=ClientContext(
                call.request_id,
                call.trace_parent,
                call.listener,
                call.reservation.record if call.reservation else None,
            ),
        )
        if state.prompt_tokens:
            self.accounting.prompt_tokens.record(self._clock.now, state.prompt_tokens)
        self._executor.advance(state)
        return state

    def _resolve_task(self, task: str, validated: ValidatedRequest) -> ResolvedTask:
        """Inputs of a request with the indices of its task, and the stages whose models have it."""
        if not task or not self._http:
            return ResolvedTask(validated.inputs)
        needed = [self.schedulers[node.name] for node in self._graph.needed(validated.requested_outputs)]
        return resolve_task(
            task,
            [stage_tasks(scheduler, task) for scheduler in needed],
            self.pipeline.spec,
            validated.inputs,
        )

    def _finish(self, state: RequestState, outcome: RequestOutcome, refusal: Refusal | None) -> None:
        state.release()
        if self._tracer is not None:
            record_request(self._tracer, state.trace_parent, state.arrived_at, outcome, state.served, refusal)

    def _response(self, request: InferRequest, state: RequestState) -> InferResponse:
        parameters, outputs = state.response_parameters(), state.cursor.outputs()
        parameters[PLAN_GENERATION] = self.plan_generation
        if ESCALATION_PENDING in parameters:
            self.metrics.unescalated_responses.inc()
        return InferResponse(
            model_name=self.pipeline.name,
            model_version=VERSION,
            id=request.id,
            parameters=parameters,
            outputs=tuple(Tensor(name, self._output_datatypes[name], array) for name, array in outputs.items()),
        )

    def _has_tighter_deadline(self, state: RequestState) -> bool:
        """Whether the request's deadline is earlier than the SLO, computed as for a request without deadline."""
        return state.deadline < state.arrived_at + self.pipeline.spec.slo.first_response_seconds

    def _disconnected_early(self, call: Call) -> bool:
        """Whether a client that disconnects now does so before the SLO is missed, and not because the router drains."""
        elapsed_seconds = self._clock.now - call.arrived_at
        return not self.draining and elapsed_seconds < self.pipeline.spec.slo.latency_seconds


def _draining_refusal() -> Refusal:
    return Refusal(
        ErrorCode.UNAVAILABLE, "Draining", "this router is shutting down; try another", retry_after_seconds=1.0
    )


def _complete(ended: asyncio.Future[None], _: RequestState) -> None:
    """Wake the task that waits for a request. The client may have disconnected."""
    if not ended.done():
        ended.set_result(None)


def _image_count(inputs: Mapping[str, Array]) -> int:
    """Number of images per chat."""
    images = inputs.get(IMAGES)
    return images.shape[1] if images is not None and images.ndim > 1 else 0
