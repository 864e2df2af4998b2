"""`Router`: serves one pipeline. Ingress passes requests, and watchers pass plans and endpoints."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isfinite
from typing import Any

from opentelemetry.trace import Tracer

from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import FAILED, OK
from trimtab_pipelines.router_state import RouterLoad, RouterState
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferResponse, Tensor
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_protocol.extensions import ESCALATION_PENDING, PLAN_GENERATION
from trimtab_protocol.http_client import Tls
from trimtab_router.admission.admission import Admission
from trimtab_router.admission.concurrency_limit import LimitBounds, limit_bounds
from trimtab_router.admission.request_parsing import VERSION
from trimtab_router.execution.executor import RequestState
from trimtab_router.execution.graph import Graph
from trimtab_router.execution.request_resolver import RequestResolver
from trimtab_router.factory import EventLoopClock, create_executor, create_transports
from trimtab_router.limits import Limits
from trimtab_router.observability.arrivals import ArrivalCounter
from trimtab_router.observability.cpu_usage import CpuUsage
from trimtab_router.observability.metrics import Metrics
from trimtab_router.observability.request_accounting import RequestAccounting
from trimtab_router.observability.stage_state import stage_states
from trimtab_router.observability.tracing import record_request
from trimtab_router.refusal import Refusal, draining
from trimtab_router.request import Call
from trimtab_router.scheduling.interfaces import Clock, Transport
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.stage_scheduler import StageScheduler
from trimtab_router.transport.token_counts import fetch_token_counts

COUNTS_AT_ONCE = 2  # token counts that replicas compute at the same time; generations must not wait for them


class Router:
    """Serves one pipeline, by default with its own policy, the event loop's clock and HTTP to the applied endpoints."""

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
        self._name = pipeline.name
        self.limits = limits or Limits()
        self.metrics = Metrics(pipeline.metadata.namespace, pipeline.name, pipeline.spec.slo)
        self.arrivals = ArrivalCounter(time.time())
        self.plan = plan
        self.plan_applied_at = time.time() if plan else None
        self.terminating = False  # Whether clients should use another router. Requests are still accepted.
        self.admission = Admission(pipeline, self.limits, self._limit_bounds)
        self._tracer = tracer
        self._graph = Graph(pipeline.spec)
        self._clock = clock or EventLoopClock()
        self._http = create_transports(self._graph, self.limits, tls) if transports is None else {}
        self._table_builder = ThreadPoolExecutor(1, "prepare")
        self._policy = policy or POLICIES[pipeline.spec.policy_name]
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
            scheduler.offered_factor = lambda: self.admission.concurrency.offered_factor
            self._prepare_policy(scheduler)
        self._resolver = RequestResolver(self._executor, self._graph, pipeline.spec, has_indices=bool(self._http))
        self.tasks = self._resolver.tasks
        self._output_datatypes = {o.name: self._graph.datatype_of(o.source) for o in pipeline.spec.outputs}
        self._counting = asyncio.Semaphore(COUNTS_AT_ONCE)
        self._cpu_usage = CpuUsage()
        self._pending: set[asyncio.Future[None]] = set()
        self.accounting = RequestAccounting(
            self.metrics, self.arrivals, self._clock, pipeline.spec.slo, self.admission.concurrency.note_overload
        )
        self.metrics.plan_generation.set(self.plan_generation)
        self.metrics.arrivals_peak.set_function(lambda: self.arrivals.peak(time.time()))
        self.metrics.bytes_in_flight.set_function(lambda: self.admission.memory.bytes_in_flight)
        self.metrics.requests_in_flight.set_function(lambda: self.admission.memory.requests)
        self.metrics.concurrency_limit.set_function(lambda: self.admission.concurrency.concurrency_limit.limit)

    @property
    def plan_generation(self) -> int:
        return self.plan.spec.generation if self.plan else 0

    @property
    def ready(self) -> bool:
        return self.accepts_traffic and all(scheduler.ready_replicas for scheduler in self._active_schedulers)

    @property
    def accepts_traffic(self) -> bool:
        """Whether clients should connect here: every active stage has had a replica, and the router is not terminating.

        A stage that has lost its replicas does not change that. All routers would become unready at once, and
        connections would be refused. A router instead queues requests for a while, or rejects them with a retry time.
        """
        return not (self.terminating or self.admission.draining) and all(
            scheduler.had_replica for scheduler in self._active_schedulers
        )

    @property
    def _active_schedulers(self) -> list[StageScheduler]:
        return [scheduler for name, scheduler in self.schedulers.items() if name not in self._executor.idle_stages]

    @property
    def max_request_seconds(self) -> float:
        return self._resolver.max_timeout_seconds + self.limits.grace_seconds + self.limits.hang_seconds

    async def infer(self, call: Call) -> InferResponse:
        """Serve a request. Raises Refusal. Cancelling the call removes the request from all queues."""
        self.accounting.count_received(call.arrived_at)
        state: RequestState | None = None
        outcome, responded = FAILED, False
        refusal: Refusal | None = None
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(ended)
        try:
            state = self._start(call, ended)
            await ended
            if state.refusal is not None:
                raise state.refusal
            self.admission.concurrency.note_response()
            outcome, responded = self.accounting.record_response(state), True
            return self._response(call.request.id, state)
        except Refusal as error:
            refusal = error
            if state is not None and refusal.client_error:
                self.accounting.withdraw_arrival(call.arrived_at)
            outcome = self.accounting.record_refusal(
                refusal, own_deadline=state is not None and self._has_tighter_deadline(state)
            )
            raise
        except asyncio.CancelledError:
            stage = next(iter(state.stage_requests), "") if state else ""
            refusal = Refusal("Cancelled", "the client disconnected", stage=stage)
            outcome = self.accounting.record_refusal(refusal, own_deadline=self._disconnected_early(call))
            raise
        finally:
            if not responded:
                self.accounting.count_outcome(outcome)
            self._pending.discard(ended)
            if state is not None:
                if state.prompt_tokens:
                    self.accounting.record_prompt(state, outcome)
                if state.stream is not None:
                    self.accounting.record_stream(state.stream)
                state.release()
                if self._tracer is not None:
                    tracing = state.trace_parent, state.arrived_at, outcome, state.served, refusal
                    record_request(self._tracer, *tracing)

    @property
    def forwards_chats(self) -> bool:
        """Whether a third-party engine serves chats now, so that fields which only the engine knows are accepted."""
        return any(stage.stage.variant(stage.variant).forwards_chats for stage in self.schedulers.values())

    @property
    def forwards_routes(self) -> bool:
        """Whether an engine also gets requests that are no chats: it reads the client's messages themselves."""
        return self.forwards_chats and self._executor.streaming_stage in self._executor.prompt_sources

    @property
    def max_model_tokens(self) -> int | None:
        """Maximum tokens of a prompt and its response, if a third-party engine reports it."""
        limits = [stage.latency_model.max_prompt_tokens for stage in self.schedulers.values() if stage.stage.generates]
        return int(limits[0]) if self.forwards_chats and limits and isfinite(limits[0]) else None

    async def count_tokens(self, call: Call) -> Usage:
        """Token counts of a chat, without generating, within the SLO of a first response. Raises Refusal.

        The request is accounted for like any other, but it is no load to plan for.
        """
        self.accounting.count_received(call.arrived_at)
        outcome = FAILED
        try:
            usage = await self._count_tokens(call)
            self.admission.concurrency.note_response()
            outcome = OK
        except Refusal as refusal:
            outcome = self.accounting.record_refusal(refusal)
            raise
        except asyncio.CancelledError:
            left = Refusal("Cancelled", "the client disconnected")
            outcome = self.accounting.record_refusal(left, own_deadline=self._disconnected_early(call))
            raise
        finally:
            self.accounting.count_outcome(outcome)
        return usage

    async def _count_tokens(self, call: Call) -> Usage:
        if self.admission.draining:
            raise draining()
        left_seconds = call.arrived_at + self.pipeline.spec.slo.first_response_seconds - self._clock.now
        try:
            async with asyncio.timeout(left_seconds), self._counting:
                return await fetch_token_counts(self._executor, self._http, call.inputs)
        except TimeoutError as error:
            raise Refusal("DeadlineExpired", "the tokens were not counted in time; try again later") from error

    def apply_plan(self, plan: PipelinePlan) -> None:
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
            scheduler.learn_exit_codes(endpoints.exit_codes or {})

    def _on_replica_change(self, scheduler: StageScheduler) -> None:
        self.tasks.learn_declared(scheduler)
        scheduler.refresh_replicas()

    async def model_metadata(self, stage: str, variant: str) -> dict[str, dict[str, Any]]:
        return await self._http[stage].model_metadata(variant) if stage in self._http else {}

    def state(self) -> RouterState:
        unauthenticated = {name: transport.unauthenticated for name, transport in self._http.items()}
        return RouterState(
            plan_generation=self.plan_generation,
            plan_applied_at=self.plan_applied_at,
            ready=self.ready,
            cpu_seconds_per_request=self._cpu_usage.sample(
                self._clock.now, time.process_time(), self.metrics.received.value
            ),
            served=self.accounting.recent.summary(self._clock.now),
            accuracy_sources=accuracy_sources(self.pipeline.spec.stages),
            stages=stage_states(
                self.schedulers, unauthenticated, self.accounting, self.metrics.row_counts, self._clock.now
            ),
        )

    def arrival_history(self, seconds: int) -> RouterLoad:
        now = time.time()
        return RouterLoad(now=now, rps=self.arrivals.history(now, seconds), current=self.arrivals.current(now))

    async def drain(self, timeout_seconds: float) -> None:
        self.admission.draining = True
        if self._pending:
            await asyncio.wait(self._pending, timeout=timeout_seconds)
        await asyncio.gather(*(transport.close() for transport in self._http.values()))
        self.admission.close()
        self._table_builder.shutdown(wait=False)  # tables in progress are completed: they are shared

    def _prepare_policy(self, scheduler: StageScheduler) -> None:
        """Precompute the policy's tables for the current plan in a thread, so that decisions do not wait."""
        if self._policy.prepare is not None and not self.admission.draining:
            model, variant = scheduler.latency_model, scheduler.plan.variant
            points = model.points(variant, ready=frozenset(other.name for other in model.stage.variants))
            self._table_builder.submit(self._policy.prepare(points, model.max_batch_rows(variant)))

    def wait_for_tables(self) -> None:
        self._table_builder.submit(int).result()

    def _limit_bounds(self) -> LimitBounds | None:
        rows = self.accounting.rows_per_request.expected(self._clock.now)
        stages = [
            (scheduler.capacity(), rows.get(scheduler.stage.name) or 1.0) for scheduler in self._active_schedulers
        ]
        return limit_bounds(
            stages,
            self.pipeline.spec.slo.latency_seconds,
            self.pipeline.spec.drop_policy,
            has_slower=any(scheduler.has_slower_points for scheduler in self._active_schedulers),
        )

    def _start(self, call: Call, ended: asyncio.Future[None]) -> RequestState:
        if self.admission.draining:
            raise draining()
        state = self._resolver.resolve(call, partial(_complete, ended))
        self.arrivals.record(time.time())
        self._executor.advance(state)
        return state

    def _response(self, request_id: str, state: RequestState) -> InferResponse:
        parameters, outputs = state.response_parameters(), state.cursor.outputs()
        parameters[PLAN_GENERATION] = self.plan_generation
        if ESCALATION_PENDING in parameters:
            self.metrics.unescalated_responses.inc()
        return InferResponse(
            model_name=self._name,
            model_version=VERSION,
            id=request_id,
            parameters=parameters,
            outputs=tuple([Tensor(name, self._output_datatypes[name], array) for name, array in outputs.items()]),
        )

    def _has_tighter_deadline(self, state: RequestState) -> bool:
        """Whether the request's deadline is earlier than the SLO, computed as for a request without deadline."""
        return state.deadline < state.arrived_at + self.pipeline.spec.slo.first_response_seconds

    def _disconnected_early(self, call: Call) -> bool:
        """Whether a client that disconnects now does so before the SLO is missed, and not because the router drains."""
        elapsed_seconds = self._clock.now - call.arrived_at
        return not self.admission.draining and elapsed_seconds < self.pipeline.spec.slo.latency_seconds


def _complete(ended: asyncio.Future[None], _: RequestState) -> None:
    if not ended.done():
        ended.set_result(None)
