"""Simulator: runs a pipeline under a load in simulated time.

The same scenario and seed give the same result; no clock is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.controller import LOAD_CHECK_SECONDS, Controller, outgrows_plan
from trimtab_adapter.forecasting import forecaster_for
from trimtab_adapter.observation import Load, State, sliding_rps
from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_adapter.simulation.generation import (
    SimulatedGenerationTransport,
    placeholder_images,
    placeholder_messages,
    typical_images,
)
from trimtab_adapter.simulation.replica_set import SimulatedReplicaSet
from trimtab_adapter.simulation.result import SecondSample, SimulationResult
from trimtab_adapter.simulation.sampling import ServiceTimeSampler, Uniform, fan_outs
from trimtab_adapter.simulation.transport import (
    BatchTally,
    SimulatedMachine,
    SimulatedReplica,
    SimulatedTransport,
    rows_of,
)
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import FAILED, LATE, OK, RequestOutcome
from trimtab_pipelines.spec import Adaptation, InferencePipeline
from trimtab_pipelines.stages import IMAGES_INPUT, MESSAGES_INPUT
from trimtab_predictor.forecaster import Forecaster, OracleForecaster
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.trace import Trace
from trimtab_protocol import InferRequest
from trimtab_protocol.tensors import Array
from trimtab_router.execution.executor import PipelineExecutor, RequestState
from trimtab_router.execution.graph import Graph
from trimtab_router.execution.request_resolver import RequestResolver
from trimtab_router.observability.arrivals import ArrivalCounter, PerRequestMean, RecentOutcomes
from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, Call, RequestOptions
from trimtab_router.scheduling.interfaces import Clock
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.queue_admission import GRACE_SECONDS
from trimtab_router.scheduling.roles import scheduler_class
from trimtab_router.scheduling.stage_scheduler import QueueSettings, StageScheduler

_REQUEST = InferRequest("", ())
_SAMPLE_SECONDS = 1.0
_IS_PENDING = attrgetter("escalation_pending")
_LONGEST_BACKLOG = 10.0
"""Multiple of the load's duration for which a backlog is still served."""
_UNANSWERED = ("", "Backlog")
"""Stage and reason of requests that remain after it."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of a simulation."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    """Profiles by stage."""
    arrivals_seconds: NDArray[np.float64]
    """[N], ascending."""
    duration_seconds: float
    """Duration of the load; requests in flight at its end are still served, for ten times as long."""
    plan: PipelinePlan
    """The first plan."""
    controller: Controller | None = None
    """Decides at each interval; None keeps the plan."""
    origin_seconds: float = 0.0
    """Unix time of second 0, recorded in decisions."""
    changes: tuple[tuple[float, PipelinePlan], ...] = ()
    """Plans applied at given seconds, without a control loop."""
    history_rps: tuple[int, ...] = ()
    """Load of the seconds before the first, for the forecaster."""
    environment: Environment = field(default_factory=Environment)
    policy: Policy | None = None
    """Scheduling policy; the pipeline's own if None."""
    rows: tuple[int, ...] = ()
    """Rows of the requests, repeated in turn; one row each by default."""
    options: tuple[RequestOptions, ...] = ()
    """Options of the requests, repeated in turn."""
    missing_inputs: tuple[frozenset[str], ...] = ()
    """Optional inputs that requests omit, repeated in turn."""
    images: tuple[int, ...] = ()
    """Images of chats, repeated in turn; by default the pipeline's expected number."""
    text_tokens: tuple[int, ...] = ()
    """Text tokens of chats, repeated in turn; by default the profiled number."""
    seed: int = 0
    """Seed of service times, fan-outs and confidences."""


def forecaster_of(
    adaptation: Adaptation, arrivals_seconds: NDArray[np.float64], duration_seconds: int, origin_seconds: float = 0.0
) -> Forecaster:
    """The forecaster a pipeline asks for; an oracle knows the arrivals of the simulation."""
    if adaptation.forecaster != "Oracle":
        return forecaster_for(adaptation, None)
    counts = np.bincount(arrivals_seconds.astype(np.int64), minlength=duration_seconds).astype(np.float64)
    return OracleForecaster(Trace(counts, "arrivals"), offset_seconds=-origin_seconds)


def simulate(scenario: Scenario) -> SimulationResult:
    return Simulator(scenario).run()


def transports(
    scenario: Scenario, clock: Clock, on_idle: Callable[[SimulatedReplica], None]
) -> dict[str, SimulatedTransport]:
    """The transport of each stage; `on_idle` is called when a draining replica has no batch left."""
    environment, stages = scenario.environment, scenario.pipeline.spec.ordered_stages
    spawned = np.random.default_rng(scenario.seed).spawn(3 * len(stages))
    streams, confidences = iter(spawned), spawned[2 * len(stages) :]
    machine = SimulatedMachine(environment.contention, environment.speeds)
    transports: dict[str, SimulatedTransport] = {}
    for stage, confidence in zip(stages, confidences, strict=True):
        if stage.name not in scenario.profiles:
            raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
        transport_type = SimulatedGenerationTransport if stage.generates else SimulatedTransport
        transports[stage.name] = transport_type(  # type: ignore[abstract]  # what no simulated stage calls
            stage,
            clock=clock,
            times=ServiceTimeSampler(stage, scenario.profiles[stage.name], environment, next(streams)),
            fan_outs=fan_outs(stage, environment, next(streams)),
            confidences=Uniform(confidence),
            environment=environment,
            machine=machine,
            on_idle=on_idle,
        )
    return transports


class Simulator:
    """State of a running scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = EventQueue()
        self.plan = scenario.plan
        self.plans = [scenario.plan]
        self.graph = Graph(scenario.pipeline.spec)
        self.batches = {stage.name: BatchTally() for stage in self.graph.stages}  # type: ignore[abstract]  # likewise
        self.transports = transports(scenario, self.events, self._replica_ended)
        self.schedulers = self._build_schedulers()
        self.executor = PipelineExecutor(self.graph, self.schedulers, self.events)
        spec, environment = scenario.pipeline.spec, scenario.environment
        self.resolver = RequestResolver(self.executor, self.graph, spec)
        self.replica_set = SimulatedReplicaSet(self.transports, spec, environment.startup_seconds, self.events)
        self.slo = spec.slo
        self.wanted = tuple(output.name for output in spec.outputs)
        self.names = tuple(tensor.name for tensor in spec.inputs)
        self.images = cycle(scenario.images or (typical_images(spec),))
        self.request_rows = cycle(scenario.rows or (1,))
        self.missing_inputs = cycle(scenario.missing_inputs or (frozenset[str](),))
        self.options = cycle(scenario.options or (NO_OPTIONS,))
        self.text_tokens = cycle(scenario.text_tokens or (0,))
        self.arrivals = scenario.arrivals_seconds.tolist()
        self.received = 0
        size = len(self.arrivals)
        self.latency = [0.0] * size
        self.outcomes = [FAILED] * size
        self.accuracy = [float("nan")] * size
        self.unescalated = np.zeros(size, dtype=np.bool_)
        self.variants: list[Mapping[str, str]] = [{}] * size
        self.points: list[Mapping[str, str]] = [{}] * size
        self.reasons: dict[int, tuple[str, str]] = {}
        self.counts = [0] * 5
        self.seconds: list[SecondSample] = []
        # The counters work on whole seconds of a clock that begins so that the history lies before second 0.
        self.counter = ArrivalCounter(-float(len(scenario.history_rps)))
        for ago, arrivals in zip(range(-len(scenario.history_rps), 0), scenario.history_rps, strict=True):
            self.counter.record(float(ago), arrivals)
        self.recent = RecentOutcomes()
        self.rows = PerRequestMean()
        self.tokens = PerRequestMean()
        self.due = 0.0

    def run(self) -> SimulationResult:
        scenario, events = self.scenario, self.events
        self.replica_set.begin(scenario.plan)
        self._sample(0.0)
        if self.arrivals:
            events.call_at(self.arrivals[0], self._arrive)
        for at_seconds, plan in scenario.changes:
            events.call_at(at_seconds, partial(self._publish, plan))
        for failure in scenario.environment.failures:
            events.call_at(failure.at_seconds, partial(self.replica_set.lose_one, failure.stage))
        if scenario.controller is not None:
            events.call_at(LOAD_CHECK_SECONDS, self._check_load)
            events.call_at(scenario.pipeline.spec.adaptation.interval_seconds, self._tick)
            self.due = scenario.pipeline.spec.adaptation.interval_seconds
        events.run(scenario.duration_seconds)
        self.replica_set.settle()
        mean_cores = self.replica_set.core_seconds / max(scenario.duration_seconds, 1e-9)
        longest_seconds = self.resolver.max_timeout_seconds + GRACE_SECONDS
        events.run((1.0 + _LONGEST_BACKLOG) * scenario.duration_seconds + longest_seconds)
        unanswered = (index for index, outcome in enumerate(self.outcomes) if outcome is FAILED)
        self.reasons = dict.fromkeys(unanswered, _UNANSWERED) | self.reasons
        return self._outcome(mean_cores)

    def _build_schedulers(self) -> dict[str, StageScheduler]:
        scenario, spec = self.scenario, self.scenario.pipeline.spec
        for name, transport in self.transports.items():
            transport.scheduler = scheduler_class(transport.stage)(
                transport.stage,
                plan=scenario.plan.spec.stage(name),
                settings=QueueSettings(spec.queue.max_rows, spec.drop_policy, GRACE_SECONDS),
                policy=scenario.policy or POLICIES[spec.policy_name],
                clock=self.events,
                transport=transport,
                stats=self.batches[name],
                query_of_death=None,
            )
            transport.scheduler.accuracy_monitor.enabled = False  # its result is not used
        return {name: transport.scheduler for name, transport in self.transports.items()}

    def _replica_ended(self, replica: SimulatedReplica) -> None:
        self.replica_set.remove_drained(replica)

    def _arrive(self) -> None:
        """Process the next request, and schedule the one after it."""
        index, now = self.received, self.events.now
        self.received += 1
        if self.received < len(self.arrivals):
            self.events.call_at(self.arrivals[self.received], self._arrive)
        if self.scenario.controller is not None:
            self.recent.count_received(now)
        images = next(self.images)
        call = Call(_REQUEST, self._inputs(images), self.wanted, next(self.options), images, now)
        try:
            request_state = self.resolver.resolve(call, partial(self._ended, index))
        except Refusal as refusal:
            self._refused(index, refusal)
            return
        if self.scenario.controller is not None:
            self.counter.record(now)
            if request_state.prompt_tokens:
                self.tokens.record(now, request_state.prompt_tokens)
        before = self.scenario.environment.before_seconds
        if before:
            self.events.call_at(now + before, partial(self.executor.advance, request_state))
        else:
            self.executor.advance(request_state)

    def _ended(self, index: int, request_state: RequestState) -> None:
        finished_at = self.events.now
        self.latency[index] = finished_at - request_state.arrived_at
        if request_state.refusal is not None:
            self._refused(index, request_state.refusal)
            return
        self.accuracy[index] = request_state.accuracy
        variants, points = {}, {}
        for stage, served in request_state.served.items():
            variants[stage], points[stage] = served[0].variant, served[0].operating_point
            if served[0].confidences is not None and any(map(_IS_PENDING, served)):
                self.unescalated[index] = True
        self.variants[index], self.points[index] = variants, points
        if self.scenario.controller is not None:
            self.rows.record(self.events.now, request_state.rows_by_stage)
        self._end(index, OK if request_state.met_slo(finished_at, self.slo) else LATE)

    def _refused(self, index: int, refusal: Refusal) -> None:
        self.reasons[index] = (refusal.stage, refusal.reason)
        self._end(index, refusal.outcome)

    def _inputs(self, images: int) -> Mapping[str, Array]:
        rows, missing_inputs, text_tokens = next(self.request_rows), next(self.missing_inputs), next(self.text_tokens)
        given: dict[str, Array] = {name: rows_of(rows) for name in self.names if name not in missing_inputs}
        if text_tokens and MESSAGES_INPUT in given:
            given[MESSAGES_INPUT] = placeholder_messages(rows, text_tokens)
        if IMAGES_INPUT in given and self.executor.streaming_stage is not None:
            del given[IMAGES_INPUT]
            given |= {IMAGES_INPUT: placeholder_images(rows, images)} if images else {}
        return given

    def _end(self, index: int, end: RequestOutcome) -> None:
        self.outcomes[index] = end
        self.counts[end] += 1
        if self.scenario.controller is not None:
            self.recent.count_outcome(self.events.now, end)

    def _sample(self, at_seconds: float) -> None:
        """Record a sample each second."""
        self._note(at_seconds)
        following = at_seconds + _SAMPLE_SECONDS
        if following <= self.scenario.duration_seconds:
            self.events.call_at(following, partial(self._sample, following))

    def _check_load(self) -> None:
        """Decide early if the load outgrew the plan."""
        now, headroom = self.events.now, self.scenario.pipeline.spec.adaptation.headroom
        if now + LOAD_CHECK_SECONDS < self.scenario.duration_seconds:
            self.events.call_at(now + LOAD_CHECK_SECONDS, self._check_load)
        if now < self.due - 1e-9 and outgrows_plan(self.plan, self._load(1).newest_rps, headroom):
            self._decide()

    def _load(self, seconds: int) -> Load:
        now = self.events.now
        counts = tuple(float(count) for count in self.counter.history(now, seconds))
        sliding = sliding_rps(counts, self.counter.current(now), now)
        return Load(self.scenario.origin_seconds + now, counts, sliding_rps=sliding)

    def _note(self, at_seconds: float) -> None:
        stages = {
            name: (scheduler.variant, scheduler.plan.batch_size, scheduler.ready_replicas, scheduler.queue.rows)
            for name, scheduler in self.schedulers.items()
        }
        rows = {name: (dict(each.rows_by_point), dict(each.escalated_rows)) for name, each in self.batches.items()}
        sample = SecondSample(at_seconds, stages, self.replica_set.cores, self.received, tuple(self.counts), rows)
        self.seconds.append(sample)

    def _tick(self) -> None:
        """Decide unless an earlier decision moved the next one."""
        if self.events.now >= self.due - 1e-9 and self.events.now < self.scenario.duration_seconds:
            self._decide()

    def _decide(self) -> None:
        scenario, now = self.scenario, self.events.now
        self.due = now + scenario.pipeline.spec.adaptation.interval_seconds
        self.events.call_at(self.due, self._tick)
        controller = scenario.controller
        if controller is None:
            return
        load = self._load(controller.lookback_seconds(scenario.origin_seconds + now))
        ratios = {
            (name, each.variant): ratio
            for name, each in self.schedulers.items()
            if (ratio := each.latency_model.service_ratio) is not None
        }
        rows, tokens = self.rows.expected(now), self.tokens.expected(now)
        state = State(rows, ratios, self.recent.summary(now), prompt_tokens=tokens)
        try:
            plan = controller.step(scenario.pipeline, scenario.profiles, self.plan, load, state)
        except (ObservationError, PlanningError):
            return  # the plan in force stays, as in the adapter
        self.plans.append(plan)
        self.plan = plan
        self.events.call_at(now + scenario.environment.reaction_seconds, partial(self._apply, plan))

    def _publish(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.plans.append(plan)
        self._apply(plan)

    def _apply(self, plan: PipelinePlan) -> None:
        for name, scheduler in self.schedulers.items():
            scheduler.apply_plan(plan.spec.stage(name))
        self.replica_set.follow(plan)

    def _outcome(self, mean_cores: float) -> SimulationResult:
        return SimulationResult(
            arrivals_seconds=self.scenario.arrivals_seconds,
            latency_seconds=np.array(self.latency),
            outcomes=np.array(self.outcomes, dtype=np.int8),
            accuracy=np.array(self.accuracy),
            reasons=self.reasons,
            variants=tuple(self.variants),
            points=tuple(self.points),
            seconds=tuple(self.seconds),
            plans=tuple(self.plans),
            mean_cores=mean_cores,
            batch_rows={name: each.rows / max(each.served_batches, 1) for name, each in self.batches.items()},
            starts=self.replica_set.starts,
            duration_seconds=self.scenario.duration_seconds,
            unescalated=self.unescalated,
            rows_by_point={name: dict(each.rows_by_point) for name, each in self.batches.items()},
            escalated_rows={name: each.escalated_rows.total() for name, each in self.batches.items()},
        )
