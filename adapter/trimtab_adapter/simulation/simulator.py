"""Runs a pipeline under a load in simulated time: arrivals in, one entry a request out.

The same scenario and seed give the same result; nothing here reads a clock.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.control_state import outgrows_plan
from trimtab_adapter.observation import Load, ObservationError, State, lookback_seconds
from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_adapter.simulation.control_loop import SimulatedControlLoop
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_adapter.simulation.generation import (
    SimulatedGenerationTransport,
    placeholder_images,
    placeholder_messages,
    usual_images,
)
from trimtab_adapter.simulation.replica import Machine, SimulatedReplica
from trimtab_adapter.simulation.replica_set import SimulatedReplicaSet
from trimtab_adapter.simulation.result import Second, SimulationResult
from trimtab_adapter.simulation.sampling import ServiceTimeSampler, fan_outs
from trimtab_adapter.simulation.transport import Batches, SimulatedTransport, rows_of
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import FAILED, LATE, OK, RequestOutcome
from trimtab_pipelines.router_state import Served
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.tensors import Array
from trimtab_router.execution.executor import PipelineExecutor, RequestState
from trimtab_router.execution.slo import SloResolver
from trimtab_router.observability.arrivals import ArrivalCounter, PerRequestMean
from trimtab_router.observability.recent_outcomes import RECENT_SECONDS
from trimtab_router.refusal import Refusal
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.request_options import NO_WISH, RequestOptions
from trimtab_router.scheduling.expiry import GRACE_SECONDS
from trimtab_router.scheduling.interfaces import Clock
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.scheduling.stage_scheduler import StageScheduler

_LOOK_SECONDS = 1.0  # the router counts whole seconds: looking more often would see nothing new
_LONGEST_BACKLOG = 10.0
"""Times the load's duration that a backlog is still answered for: one that takes longer tells no more."""
_UNANSWERED = ("", "Backlog")
"""Where and why those have no answer that wait longer."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        pipeline: what is served.
        profiles: how fast it is, by stage.
        arrivals_seconds: [N], ascending.
        duration_seconds: of the load; what is under way then is still answered, for ten times as long.
        plan: what runs at first.
        adaptation: the slow loop; None keeps the plan.
        changes: plans put into force at given seconds, where there is no slow loop.
        history_rps: load of the seconds before the first, so that a forecaster has something to go by.
        conditions: how the machines behave.
        policy: decides every departure; the pipeline's own where it is None.
        rows: of the requests, which take turns with these; one row each where there are none.
        wishes: of the requests, in turns too; nothing but an answer where there are none.
        lacks: the optional inputs that requests come without, in turns too.
        images: that chats show, in turns too; what the pipeline expects where there are none.
        text_tokens: of the words of chats, in turns too; as many as were profiled where there are none.
        seed: of service times, fan-outs and confidences.
    """

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    arrivals_seconds: NDArray[np.float64]
    duration_seconds: float
    plan: PipelinePlan
    adaptation: SimulatedControlLoop | None = None
    changes: tuple[tuple[float, PipelinePlan], ...] = ()
    history_rps: tuple[int, ...] = ()
    conditions: Environment = field(default_factory=Environment)
    policy: Policy | None = None
    rows: tuple[int, ...] = ()
    wishes: tuple[RequestOptions, ...] = ()
    lacks: tuple[frozenset[str], ...] = ()
    images: tuple[int, ...] = ()
    text_tokens: tuple[int, ...] = ()
    seed: int = 0


def simulate(scenario: Scenario) -> SimulationResult:
    """Simulate it to the end."""
    return Simulator(scenario).run()


def transports(
    scenario: Scenario, clock: Clock, on_idle: Callable[[SimulatedReplica], None]
) -> dict[str, SimulatedTransport]:
    """Who carries the batches of each stage; `on_idle` is called when a draining replica has none left."""
    conditions, stages = scenario.conditions, scenario.pipeline.spec.order
    spawned = np.random.default_rng(scenario.seed).spawn(3 * len(stages))
    streams, confidences = iter(spawned), spawned[2 * len(stages) :]
    machine = Machine(conditions.contention, conditions.speeds)
    carriers: dict[str, SimulatedTransport] = {}
    for stage, confidence in zip(stages, confidences, strict=True):
        if stage.name not in scenario.profiles:
            raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
        made = SimulatedGenerationTransport if stage.generates else SimulatedTransport
        carriers[stage.name] = made(
            stage,
            clock=clock,
            times=ServiceTimeSampler(stage, scenario.profiles[stage.name], conditions, next(streams)),
            fan_outs=fan_outs(stage, conditions, next(streams)),
            confidences=confidence,
            transfer_seconds=conditions.transfer_seconds,
            load_seconds=conditions.load_seconds,
            machine=machine,
            on_idle=on_idle,
        )
    return carriers


class Simulator:
    """All that changes while a scenario runs."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = EventQueue()
        self.plan = scenario.plan
        self.plans = [scenario.plan]
        self.graph = Graph(scenario.pipeline.spec)
        self.batches = {stage.name: Batches() for stage in self.graph.stages}
        self.carriers = transports(scenario, self.agenda, self._replica_ended)
        self.desks = self._build_desks()
        self.course = PipelineExecutor(self.graph, self.desks, self.agenda)
        spec, conditions = scenario.pipeline.spec, scenario.conditions
        self.reception = SloResolver(self.course, self.graph, spec.slo)
        limit = spec.budget.cores + spec.budget.surge_cores
        self.fleet = SimulatedReplicaSet(self.carriers, limit, conditions.startup_seconds, self.agenda)
        self.slo = spec.slo
        self.images = scenario.images or (usual_images(spec),)
        self.wanted = tuple(output.name for output in spec.outputs)
        self.names = tuple(tensor.name for tensor in spec.inputs)
        self.request_rows = scenario.rows or (1,)
        self.lacks = scenario.lacks or (frozenset[str](),)
        self.wishes = scenario.wishes or (NO_WISH,)
        self.arrivals = scenario.arrivals_seconds.tolist()
        self.received = 0
        size = len(self.arrivals)
        self.latency = [0.0] * size
        self.ends = [FAILED] * size
        self.accuracy = [float("nan")] * size
        self.provisional = np.zeros(size, dtype=np.bool_)
        self.variants: list[Mapping[str, str]] = [{}] * size
        self.points: list[Mapping[str, str]] = [{}] * size
        self.reasons: dict[int, tuple[str, str]] = {}
        self.counts = [0] * 5
        self.seconds: list[Second] = []
        # The counters work on whole seconds of a clock that begins so that the history lies before second 0.
        self.counter = ArrivalCounter(-float(len(scenario.history_rps)))
        for ago, arrivals in zip(range(-len(scenario.history_rps), 0), scenario.history_rps, strict=True):
            self.counter.record(float(ago), arrivals)
        self.asked_at = -math.inf
        self.rows = PerRequestMean()
        self.tokens = PerRequestMean()
        self.due = 0.0

    def run(self) -> SimulationResult:
        """Let all happen."""
        scenario, agenda = self.scenario, self.agenda
        self.fleet.begin(scenario.plan)
        self._look(0.0)
        if self.arrivals:
            agenda.at(self.arrivals[0], self._arrive)
        for at_seconds, plan in scenario.changes:
            agenda.at(at_seconds, partial(self._publish, plan))
        for failure in scenario.conditions.failures:
            agenda.at(failure.at_seconds, partial(self._fail, failure.stage))
        if scenario.adaptation is not None:
            agenda.at(scenario.pipeline.spec.adaptation.interval_seconds, self._tick)
            self.due = scenario.pipeline.spec.adaptation.interval_seconds
        agenda.run(scenario.duration_seconds)
        self.fleet.settle()
        mean_cores = self.fleet.core_seconds / max(scenario.duration_seconds, 1e-9)
        longest_seconds = self.reception.longest_seconds + GRACE_SECONDS
        agenda.run((1.0 + _LONGEST_BACKLOG) * scenario.duration_seconds + longest_seconds)
        self._give_up()
        return self._outcome(mean_cores)

    def _give_up(self) -> None:
        """Say of whoever still waits why it has no answer."""
        for index, end in enumerate(self.ends):
            if end is FAILED:
                self.reasons.setdefault(index, _UNANSWERED)

    def _build_desks(self) -> dict[str, StageScheduler]:
        scenario, spec = self.scenario, self.scenario.pipeline.spec
        for name, carrier in self.carriers.items():
            carrier.desk = StageScheduler(
                carrier.stage,
                plan=scenario.plan.spec.stage(name),
                max_rows=spec.queue.max_rows,
                policy=scenario.policy or POLICIES[spec.scheduling_policy],
                drop_policy=spec.drop_policy,
                clock=self.agenda,
                carrier=carrier,
                tally=self.batches[name],
                suspects=None,
                grace_seconds=GRACE_SECONDS,
            )
        return {name: carrier.desk for name, carrier in self.carriers.items()}

    def _replica_ended(self, replica: SimulatedReplica) -> None:
        self.fleet.ended(replica)

    def _arrive(self) -> None:
        """Take the next request, and set the alarm for the one after it."""
        index, now = self.received, self.agenda.now
        self.received += 1
        if self.received < len(self.arrivals):
            self.agenda.at(self.arrivals[self.received], self._arrive)
        walk = GraphCursor(self.graph, self._inputs(index), self.wanted)
        try:
            terms = self.reception.terms(self.wishes[index % len(self.wishes)], walk, now)
        except Refusal as refusal:
            self._refused(index, refusal)
            return
        if self.scenario.adaptation is not None:
            self.counter.record(now)
        ended, images = partial(self._ended, index), self.images[index % len(self.images)]
        journey = RequestState(self.course, walk, terms, arrived_at=now, ended=ended, images=images)
        if journey.prompt_tokens and self.scenario.adaptation is not None:
            self.tokens.record(now, journey.prompt_tokens)
        before = self.scenario.conditions.before_seconds
        if before:
            self.agenda.at(now + before, partial(self.course.advance, journey))
        else:
            self.course.advance(journey)

    def _ended(self, index: int, journey: RequestState) -> None:
        had_at = self.agenda.now
        if journey.refusal is not None:
            self.latency[index] = had_at - journey.arrived_at
            self._refused(index, journey.refusal)
            return
        had_at += self.scenario.conditions.after_seconds
        self.latency[index], self.accuracy[index] = had_at - journey.arrived_at, journey.accuracy
        variants, points = {}, {}
        for stage, served in journey.served.items():
            variants[stage], points[stage] = served[0].variant, served[0].operating_point
            if served[0].confidences is not None:
                self.provisional[index] |= any(piece.provisional for piece in served)
        self.variants[index], self.points[index] = variants, points
        if self.scenario.adaptation is not None:
            self.rows.record(self.agenda.now, journey.rows_by_stage)
        self._end(index, OK if journey.in_time(had_at, self.slo) else LATE)

    def _refused(self, index: int, refusal: Refusal) -> None:
        self.reasons[index] = (refusal.stage, refusal.reason)
        self._end(index, refusal.end)

    def _inputs(self, index: int) -> Mapping[str, Array]:
        rows, lacks = self.request_rows[index % len(self.request_rows)], self.lacks[index % len(self.lacks)]
        images = self.images[index % len(self.images)]
        given: dict[str, Array] = {name: rows_of(rows) for name in self.names if name not in lacks}
        if self.scenario.text_tokens and MESSAGES_INPUT in given:
            given[MESSAGES_INPUT] = placeholder_messages(
                rows, self.scenario.text_tokens[index % len(self.scenario.text_tokens)]
            )
        if IMAGES_INPUT in given and self.course.teller is not None:
            del given[IMAGES_INPUT]
            given |= {IMAGES_INPUT: placeholder_images(rows, images)} if images else {}
        return given

    def _end(self, index: int, end: RequestOutcome) -> None:
        self.ends[index] = end
        self.counts[end] += 1

    def _look(self, at_seconds: float) -> None:
        """Note what runs, once a second; see whether the load has outgrown the plan."""
        self._note(at_seconds)
        following = at_seconds + _LOOK_SECONDS
        if following <= self.scenario.duration_seconds:
            self.agenda.at(following, partial(self._look, following))
        if self.scenario.adaptation is None or self.agenda.now >= self.due - 1e-9:
            return
        newest = self.counter.history(self.agenda.now, 1)
        if newest and outgrows_plan(self.plan, newest[-1], self.scenario.pipeline.spec.adaptation.headroom):
            self._decide()

    def _note(self, at_seconds: float) -> None:
        stages = {
            name: (desk.variant, desk.plan.batch_size, desk.ready_replicas, desk.queue.rows)
            for name, desk in self.desks.items()
        }
        self.seconds.append(Second(at_seconds, stages, self.fleet.cores, self.received, tuple(self.counts)))

    def _tick(self) -> None:
        """Decide where no earlier decision has moved the next one."""
        if self.agenda.now >= self.due - 1e-9 and self.agenda.now < self.scenario.duration_seconds:
            self._decide()

    def _decide(self) -> None:
        scenario, now = self.scenario, self.agenda.now
        self.due = now + scenario.pipeline.spec.adaptation.interval_seconds
        self.agenda.at(self.due, self._tick)
        adaptation = scenario.adaptation
        if adaptation is None:
            return
        counts, self.asked_at = self.counter.history(now, lookback_seconds(now - self.asked_at)), now
        load = Load(adaptation.origin_seconds + now, tuple(float(count) for count in counts))
        ratios = {(name, desk.variant): desk.outlook.service_ratio for name, desk in self.desks.items()}
        state = State(self.rows.expected(now), ratios, self._served(), prompt_tokens=self.tokens.expected(now))
        try:
            plan = adaptation.tick(scenario.pipeline, scenario.profiles, self.plan, load, state)
        except (ObservationError, PlanningError):
            return  # the plan in force is held, as the adapter holds it
        self.plans.append(plan)
        self.plan = plan
        self.agenda.at(now + scenario.conditions.reaction_seconds, partial(self._put_in_force, plan))

    def _served(self) -> Served:
        """What became of the requests of the last minute: what a router tells, but for latency and accuracy."""
        first = int(self.agenda.now) - RECENT_SECONDS
        before = self.seconds[first] if first > 0 else self.seconds[0]
        ends = {end.word: self.counts[end] - before.ends[end] for end in RequestOutcome}
        return Served(received=self.received - before.received, **ends)

    def _publish(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.plans.append(plan)
        self._put_in_force(plan)

    def _put_in_force(self, plan: PipelinePlan) -> None:
        for name, desk in self.desks.items():
            desk.apply_plan(plan.spec.stage(name))
        self.fleet.follow(plan)

    def _fail(self, stage: str) -> None:
        self.fleet.lose_one(stage)

    def _outcome(self, mean_cores: float) -> SimulationResult:
        return SimulationResult(
            arrivals_seconds=self.scenario.arrivals_seconds,
            latency_seconds=np.array(self.latency),
            ends=np.array(self.ends, dtype=np.int8),
            accuracy=np.array(self.accuracy),
            reasons=self.reasons,
            variants=tuple(self.variants),
            points=tuple(self.points),
            seconds=tuple(self.seconds),
            plans=tuple(self.plans),
            mean_cores=mean_cores,
            batch_rows={name: each.rows / max(each.served_batches, 1) for name, each in self.batches.items()},
            starts=self.fleet.starts,
            duration_seconds=self.scenario.duration_seconds,
            provisional=self.provisional,
            rows_by_point={name: dict(each.rows_by_point) for name, each in self.batches.items()},
            rows_again={name: each.rows_again for name, each in self.batches.items()},
        )
