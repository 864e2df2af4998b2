"""The heart of the process: takes requests in, walks each through its stages, gives every one exactly one answer.

It knows no transport and no files: ingress gives it requests, `plans` gives it plans and endpoints.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from opentelemetry.trace import Tracer

from trimtab_pipelines.accuracy import sources
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import FAILED, RequestOutcome
from trimtab_pipelines.router_state import RouterLoad, RouterState
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TaskRecord
from trimtab_protocol import InferRequest, InferResponse, PendingRequest, ProtocolError, Tensor
from trimtab_protocol.chat.internal_wire import IMAGES, Usage
from trimtab_protocol.extensions import PLAN_GENERATION, PROVISIONAL
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
from trimtab_router.execution.executor import RequestState
from trimtab_router.execution.slo import SloResolver
from trimtab_router.factory import create_executor, create_transports
from trimtab_router.limits import Limits, decoding_bytes, kept_bytes
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
from trimtab_router.scheduling.stage_tasks import stage_tasks
from trimtab_router.scheduling.task_registration import learn_declared_tasks, register_task, unregister_task
from trimtab_router.transport.token_counts import fetch_token_counts

BODY_SECONDS = 10.0
PATIENCE_SHARE = 0.2
"""Of the SLO, how long a request may wait to be let in before it is refused: what is left must be worth serving."""


class Router:
    """Serves one pipeline.

    Args:
        pipeline: what was asked.
        plan: what runs at first; without one each stage starts with its first variant, row by row.
        limits: bounds of the process.
        policy: decides every departure; the pipeline's own where it is None.
        tracer: writes spans; None for none.
        tls: what connections to replicas are secured with.
        clock: tells the time of requests and batches; the event loop's unless told otherwise.
        carriers: take each stage's batches to its replicas; None for HTTP, to the endpoints applied.
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
        carriers: Mapping[str, Transport] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.limits = limits or Limits()
        self.metrics = Metrics(pipeline.metadata.namespace, pipeline.name, pipeline.spec.slo)
        self.arrivals = ArrivalCounter(time.time())
        self.plan = plan
        self.plan_applied_at = time.time() if plan else None
        self.leaving = False
        """Whether callers should go to another router; requests are still taken."""
        self.draining = False
        """Whether requests are no longer taken."""
        self._tracer = tracer
        self._graph = Graph(pipeline.spec)
        self._clock = clock or EventLoopClock()
        self._http = create_transports(self._graph, self.limits, tls) if carriers is None else {}
        self._preparing = ThreadPoolExecutor(1, "prepare")
        self._policy = policy or POLICIES[pipeline.spec.scheduling_policy]
        self._course = create_executor(
            self._graph,
            pipeline.spec,
            plan,
            policy=self._policy,
            clock=self._clock,
            carriers=carriers or self._http,
            metrics=self.metrics,
            grace_seconds=self.limits.grace_seconds,
        )
        self._desks = self._course.desks
        for desk in self._desks.values():
            self._prepare(desk)
        self._reception = SloResolver(self._course, self._graph, pipeline.spec.slo)
        self._output_datatypes = {o.name: self._graph.datatype_of(o.source) for o in pipeline.spec.outputs}
        self._options = options_inputs(pipeline.spec)
        self._turnstile = EntryGate(PATIENCE_SHARE * pipeline.spec.slo.start_seconds)
        limits = self.limits
        self._sweeping = CollectorPacer()
        self.budget = MemoryBudget(
            limits.max_bytes_in_flight, limits.max_client_requests, limits.max_client_bytes, self._sweeping.soon
        )
        self.pacer = ConcurrencyController(
            ConcurrencyLimit(pipeline.spec.slo.latency_seconds), self.budget, self._bounds
        )
        self._decoding = ThreadPoolExecutor(1, "decode")  # one at a time: what decoding costs in passing is bounded too
        self._waiting: set[asyncio.Future[None]] = set()
        self.accounts = RequestAccounting(
            self.metrics, self.arrivals, self._clock, pipeline.spec.slo, self.pacer.note_overload
        )
        self.metrics.plan_generation.set(self.plan_generation)
        self.metrics.arrivals_peak.set_function(lambda: self.arrivals.peak(time.time()))
        self.metrics.bytes_in_flight.set_function(lambda: self.budget.bytes_in_flight)
        self.metrics.requests_in_flight.set_function(lambda: self.budget.requests)
        self.metrics.concurrency_limit.set_function(lambda: self.pacer.window.limit)

    @property
    def body_seconds(self) -> float:
        """How long the body of a request may take to arrive."""
        return self.limits.body_seconds or max(BODY_SECONDS, self.pipeline.spec.slo.latency_seconds)

    @property
    def plan_generation(self) -> int:
        """The generation of the plan in force, 0 before the first."""
        return self.plan.spec.generation if self.plan else 0

    @property
    def ready(self) -> bool:
        """Whether every stage has a replica and callers are welcome."""
        return self.accepts_traffic and all(desk.ready_replicas for desk in self._working)

    @property
    def accepts_traffic(self) -> bool:
        """Whether callers should come here: every stage has had a replica, and the router does not leave.

        A stage that lost its replicas is no reason to send callers away. All routers would at once, and where there is
        none left, connections are refused without a word; a router keeps requests a while, or says when to try again.
        """
        return not (self.leaving or self.draining) and all(desk.had_replica for desk in self._working)

    @property
    def _working(self) -> list[StageScheduler]:
        """The desks that something goes to."""
        return [desk for name, desk in self._desks.items() if name not in self._course.idle]

    @property
    def longest_seconds(self) -> float:
        """After so long every request is answered or refused."""
        return self._reception.longest_seconds + self.limits.grace_seconds + self.limits.hang_seconds

    async def infer(self, call: Call) -> InferResponse:
        """Serve a request; raises Refusal. A cancelled call frees what the request still has in the queues."""
        self.accounts.received(call.arrived_at)
        journey: RequestState | None = None
        end = FAILED
        why: Refusal | None = None
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ended)
        try:
            journey = self._begin(call, ended)
            await ended
            if journey.refusal is not None:
                raise journey.refusal
            self.pacer.note_answer()
            end = self.accounts.answered(journey)
            return self._answer(call.request, journey)
        except Refusal as refusal:
            why = refusal
            end = self.accounts.refused(refusal, by_own_deadline=journey is not None and self._asked_too_much(journey))
            raise
        except asyncio.CancelledError:
            stage = next(iter(journey.works), "") if journey else ""
            why = Refusal(ErrorCode.CANCELLED, "Cancelled", "the caller left", stage=stage)
            end = self.accounts.refused(why, by_own_deadline=self._left_early(call))
            raise
        finally:
            self.accounts.ended(end)
            self._waiting.discard(ended)
            if journey is not None:
                self.accounts.delivered(journey.delivery)
                self._end(journey, end, why)

    async def count(self, call: Call) -> Usage:
        """What a chat would take, by a replica that only counts; nothing runs, and nothing is counted as served.

        Raises:
            Refusal: the chat cannot be served as it is, or nobody can tell.
        """
        return await fetch_token_counts(self._course, self._http, self._admitted(call.request).inputs)

    async def admit(self, arrived_at: float, client: str = "") -> Reservation:
        """Let a request in, once it is its turn of the event loop; it ends with the reservation's context.

        Raises:
            Refusal: already counted; in overload, or because its client has as much under way as it may.
        """
        reservation = None
        try:
            self.pacer.check()
            reservation = self.budget.reservation(client)
            await self._turnstile.enter(arrived_at)
        except BaseException as error:
            if reservation is not None:
                reservation.end()
            if isinstance(error, Refusal):
                raise self.accounts.turned_away(error) from error
            raise
        return reservation

    async def validate(self, pending: PendingRequest, reservation: Reservation) -> ValidatedRequest:
        """Check a request and decode its tensors, in a thread where that takes long; the loop goes on meanwhile.

        What it says of itself is checked before any value is decoded.

        Args:
            pending: the request.
            reservation: grows by what decoding costs.

        Raises:
            Refusal: already counted.
        """
        name, spec = self.pipeline.name, self.pipeline.spec
        try:
            if not (pending.slow or is_slow_to_rewrite(self._options, pending.inputs)):
                return self._decode(pending, reservation.client)
            validate_header(name, spec, pending.request, pending.inputs)
            if self.draining:
                raise _draining()
            cost = decoding_bytes(pending, reservation.size_bytes)
            reservation.grow(cost)
            loop = asyncio.get_running_loop()
            admitted = await loop.run_in_executor(self._decoding, self._decode, pending, reservation.client)
            reservation.note(kept_bytes(admitted) - cost)
        except ProtocolError as error:
            raise self.accounts.turned_away(malformed(error)) from error
        except Refusal as refusal:
            raise self.accounts.turned_away(refusal) from refusal
        return admitted

    def apply_plan(self, plan: PipelinePlan) -> None:
        """Follow a new plan from the next batch on."""
        self.plan = plan
        self.plan_applied_at = time.time()
        self.metrics.plan_generation.set(plan.spec.generation)
        for name, desk in self._desks.items():
            desk.apply_plan(plan.spec.stage(name))
            self._prepare(desk)

    def apply_endpoints(self, endpoints: Endpoints) -> None:
        """Use these replicas; those no longer named finish what they hold and are left."""
        for name, carrier in self._http.items():
            desk = self._desks[name]
            desk.set_replicas(carrier.follow(endpoints.stages.get(name, ()), partial(self._changed, desk)))

    def _changed(self, desk: StageScheduler) -> None:
        """What a replica can serve changed: it has told of its tasks before."""
        learn_declared_tasks(desk, self.pipeline.spec.objective.accuracy_basis)
        desk.refresh_replicas()

    def register_task(self, stage: str, variant: str, task: str, card: TaskRecord) -> None:
        """Know a task that joined a variant while it runs."""
        basis = self.pipeline.spec.objective.accuracy_basis
        register_task(self._desks[stage], variant, task, card.accuracy_by_point, basis)
        self._reception.enrol(task, card)

    def unregister_task(self, stage: str, variant: str, task: str) -> None:
        """Forget a task that joined a variant, and what its requests are granted where no other variant has it."""
        unregister_task(self._desks[stage], variant, task)
        self._reception.dismiss(task)

    async def model_metadata(self, stage: str, variant: str) -> dict[str, dict[str, Any]]:
        """What the replicas that are ready for a variant tell of it, by their names."""
        return await self._http[stage].facts(variant) if stage in self._http else {}

    def state(self) -> RouterState:
        """What runs now."""
        now = self._clock.now
        rows_per_request, tokens = self.accounts.rows.expected(now), self.accounts.prompt_tokens.expected(now)
        refused = {name: self._http[name].refused if name in self._http else {} for name in self._desks}
        return RouterState(
            plan_generation=self.plan_generation,
            plan_applied_at=self.plan_applied_at,
            ready=self.ready,
            served=self.accounts.recent.summary(now),
            accuracy_sources=sources(self.pipeline.spec.stages),
            stages={
                name: stage_state(desk, rows_per_request.get(name), tokens.get(name), refused[name], now)
                for name, desk in self._desks.items()
            },
        )

    def load(self, seconds: int) -> RouterLoad:
        """Arrivals of the last so many whole seconds."""
        now = time.time()
        return RouterLoad(now=now, rps=self.arrivals.history(now, seconds))

    async def drain(self, timeout_seconds: float) -> None:
        """Take no more requests, let those under way end, then close all connections."""
        self.draining = True
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=timeout_seconds)
        await asyncio.gather(*(carrier.close() for carrier in self._http.values()))
        self.pacer.close()
        self._sweeping.close()
        self._decoding.shutdown(wait=False)  # who is in line there is still decoded, and told to try another router
        self._preparing.shutdown(wait=False)  # what is begun is ended: others may look it up too

    def _prepare(self, desk: StageScheduler) -> None:
        """Have a thread work out what decisions by the new plan will look up; they wait for nothing."""
        if self._policy.prepare is not None and not self.draining:
            outlook, variant = desk.outlook, desk.plan.variant
            self._preparing.submit(self._policy.prepare(outlook.points(variant), outlook.most_rows(variant)))

    def _bounds(self) -> LimitBounds | None:
        """What the replicas that are ready can carry; None while a stage has none, which says nothing of the next."""
        rows = self.accounts.rows.expected(self._clock.now)
        stages = [(desk.capacity(), rows.get(desk.stage.name) or 1.0) for desk in self._working]
        return limit_bounds(stages, self.pipeline.spec.slo.latency_seconds, self.pipeline.spec.drop_policy)

    def _decode(self, pending: PendingRequest, client: str) -> ValidatedRequest:
        """Decode a client's request, and say whose its chats are; changes nothing, so that any thread may."""
        return with_tenant(
            decode_and_validate(self.pipeline.name, self.pipeline.spec, pending), self._options, client=client
        )

    def _admitted(self, request: InferRequest) -> ValidatedRequest:
        try:
            return decode_and_validate(self.pipeline.name, self.pipeline.spec, PendingRequest.of(request))
        except ProtocolError as error:
            raise malformed(error) from error

    def _begin(self, call: Call, ended: asyncio.Future[None]) -> RequestState:
        admitted = call.admitted or self._admitted(call.request)
        if self.draining:
            raise _draining()
        asked = self._named(admitted.wish.task, admitted)
        walk = GraphCursor(self._graph, asked.inputs, admitted.wanted)
        terms = self._reception.terms(admitted.wish, walk, call.arrived_at, call.deadline_seconds, asked.stages)
        lacks = missing_task_inputs(self.pipeline.name, self.pipeline.spec, asked.inputs)
        if lacks is not None:
            raise lacks
        self.arrivals.record(time.time())
        journey = RequestState(
            self._course,
            walk,
            terms,
            arrived_at=call.arrived_at,
            ended=partial(_tell, ended),
            hold=call.reservation.note if call.reservation else None,
            request_id=call.request_id,
            trace_parent=call.trace_parent,
            listener=call.listener,
            images=_images(admitted.inputs),
            named=asked.stages,
        )
        if journey.prompt_tokens:
            self.accounts.prompt_tokens.record(self._clock.now, journey.prompt_tokens)
        self._course.advance(journey)
        return journey

    def _named(self, task: str, admitted: ValidatedRequest) -> ResolvedTask:
        """The inputs of a request, and the stages whose models have the task that it names."""
        if not task or not self._http:
            return ResolvedTask(admitted.inputs)
        needed = [self._desks[node.name] for node in self._graph.needed(admitted.wanted)]
        return resolve_task(
            task, [stage_tasks(desk.outlook, desk.slots, task) for desk in needed], self.pipeline.spec, admitted.inputs
        )

    def _end(self, journey: RequestState, end: RequestOutcome, why: Refusal | None) -> None:
        journey.leave()
        if self._tracer is not None:
            record_request(self._tracer, journey.trace_parent, journey.arrived_at, end, journey.served, why)

    def _answer(self, request: InferRequest, journey: RequestState) -> InferResponse:
        parameters, outputs = journey.parameters(), journey.walk.answer()
        parameters[PLAN_GENERATION] = self.plan_generation
        if PROVISIONAL in parameters:
            self.metrics.provisional.inc()
        return InferResponse(
            model_name=self.pipeline.name,
            model_version=VERSION,
            id=request.id,
            parameters=parameters,
            outputs=tuple(Tensor(name, self._output_datatypes[name], array) for name, array in outputs.items()),
        )

    def _asked_too_much(self, journey: RequestState) -> bool:
        """Whether its own deadline is before the promise's, which is summed as for who has none: they round alike."""
        return journey.deadline < journey.arrived_at + self.pipeline.spec.slo.start_seconds

    def _left_early(self, call: Call) -> bool:
        """Whether a caller who leaves now does so before the promise was due, and not because we do."""
        waited_seconds = self._clock.now - call.arrived_at
        return not self.draining and waited_seconds < self.pipeline.spec.slo.latency_seconds


def _draining() -> Refusal:
    return Refusal(
        ErrorCode.UNAVAILABLE, "Draining", "this router is shutting down; try another", retry_after_seconds=1.0
    )


def _tell(ended: asyncio.Future[None], _: RequestState) -> None:
    """Let whoever waits for a journey go on; nobody does where the caller left."""
    if not ended.done():
        ended.set_result(None)


def _images(inputs: Mapping[str, Array]) -> int:
    """How many images a chat shows."""
    images = inputs.get(IMAGES)
    return images.shape[1] if images is not None and images.ndim > 1 else 0
