"""Runs a pipeline under a load in simulated time: arrivals in, one entry a request out.

The same scenario and seed give the same result; nothing here reads a clock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.deliberation import outgrown
from trimtab_adapter.observation import Load, ObservationError, seconds_to_ask
from trimtab_adapter.options import PlanningError
from trimtab_adapter.simulation.adaptation import Adaptation
from trimtab_adapter.simulation.agenda import Agenda
from trimtab_adapter.simulation.chance import ServiceTimes, fan_outs
from trimtab_adapter.simulation.conditions import Conditions
from trimtab_adapter.simulation.fleet import Fleet
from trimtab_adapter.simulation.journey import SimulatedJourney
from trimtab_adapter.simulation.outcome import Second, Simulated
from trimtab_adapter.simulation.replica import Machine, SimulatedReplica
from trimtab_adapter.simulation.stage import SimulatedStage, rows_of
from trimtab_pipelines.ends import FAILED, LATE, OK, End
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.graph import Graph, Walk
from trimtab_router.load import ArrivalCounter, RowCounter
from trimtab_router.policies import Policy, fixed
from trimtab_router.refusal import Refusal
from trimtab_router.work import Work

GRACE_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # the router counts whole seconds: looking more often would see nothing new


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        pipeline: what is served.
        profiles: how fast it is, by stage.
        arrivals_seconds: [N], ascending.
        duration_seconds: of the load; what is under way then is still answered.
        plan: what runs at first.
        adaptation: the slow loop; None keeps the plan.
        changes: plans put into force at given seconds, where there is no slow loop.
        history_rps: load of the seconds before the first, so that a forecaster has something to go by.
        conditions: how the machines behave.
        policy: chooses the operating point of each batch.
        seed: of service times and fan-outs.
    """

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    arrivals_seconds: NDArray[np.float64]
    duration_seconds: float
    plan: PipelinePlan
    adaptation: Adaptation | None = None
    changes: tuple[tuple[float, PipelinePlan], ...] = ()
    history_rps: tuple[int, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    policy: Policy = fixed.choose
    seed: int = 0


def simulate(scenario: Scenario) -> Simulated:
    """Simulate it to the end."""
    return _Simulation(scenario).run()


class _Simulation:
    """All that changes while a scenario runs."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = Agenda()
        self.plan = scenario.plan
        self.plans = [scenario.plan]
        self.graph = Graph(scenario.pipeline.spec)
        self.stages = self._build_stages()
        spec, conditions = scenario.pipeline.spec, scenario.conditions
        limit = spec.budget.cores + spec.budget.surge_cores
        self.fleet = Fleet(self.stages, limit, conditions.startup_seconds, self.agenda)
        self.wanted = tuple(output.name for output in spec.outputs)
        self.inputs = {tensor.name: rows_of(1) for tensor in spec.inputs}
        self.arrivals = scenario.arrivals_seconds.tolist()
        self.received = 0
        size = len(self.arrivals)
        self.latency = [0.0] * size
        self.ends = [FAILED] * size
        self.accuracy = [float("nan")] * size
        self.variants: list[Mapping[str, str]] = [{}] * size
        self.reasons: dict[int, tuple[str, str]] = {}
        self.counts = [0] * 5
        self.seconds: list[Second] = []
        # The counters work on whole seconds of a clock that begins so that the history lies before second 0.
        self.counter = ArrivalCounter(-float(len(scenario.history_rps)))
        for ago, arrivals in zip(range(-len(scenario.history_rps), 0), scenario.history_rps, strict=True):
            self.counter.record(float(ago), arrivals)
        self.asked_at = -math.inf
        self.rows = RowCounter()
        self.due = 0.0

    def run(self) -> Simulated:
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
        agenda.run(scenario.duration_seconds + 2.0 * scenario.pipeline.spec.slo.latency_seconds + GRACE_SECONDS)
        return self._outcome(mean_cores)

    def _build_stages(self) -> dict[str, SimulatedStage]:
        scenario = self.scenario
        spec, conditions = scenario.pipeline.spec, scenario.conditions
        streams = iter(np.random.default_rng(scenario.seed).spawn(2 * len(spec.order)))
        stages, machine = {}, Machine(conditions.contention, conditions.speeds)
        for stage in spec.order:
            if stage.name not in scenario.profiles:
                raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
            stages[stage.name] = SimulatedStage(
                stage,
                plan=scenario.plan.spec.stage(stage.name),
                agenda=self.agenda,
                times=ServiceTimes(stage, scenario.profiles[stage.name], conditions, next(streams)),
                fan_outs=fan_outs(stage, conditions, next(streams)),
                drop_policy=spec.drop_policy,
                max_rows=spec.queue.max_rows,
                policy=scenario.policy,
                transfer_seconds=conditions.transfer_seconds,
                machine=machine,
                grace_seconds=GRACE_SECONDS,
                on_idle=self._replica_ended,
            )
        for name, built in stages.items():
            built.followers = tuple(stages[follower] for follower in self.graph.following(name))
        return stages

    def _replica_ended(self, replica: SimulatedReplica) -> None:
        self.fleet.ended(replica)

    def _arrive(self) -> None:
        """Take the next request, and set the alarm for the one after it."""
        index, now = self.received, self.agenda.now
        self.received += 1
        if self.received < len(self.arrivals):
            self.agenda.at(self.arrivals[self.received], self._arrive)
        self.counter.record(now)
        deadline = now + self.scenario.pipeline.spec.slo.latency_seconds
        walk = Walk(self.graph, self.inputs, self.wanted)
        journey = SimulatedJourney(index, walk, now, deadline, self._advance, self._refuse)
        before = self.scenario.conditions.before_seconds
        if before:
            self.agenda.at(now + before, partial(self._advance, journey))
        else:
            self._advance(journey)

    def _advance(self, journey: SimulatedJourney) -> None:
        """Queue whatever became runnable; answer once nothing is left."""
        now = self.agenda.now
        for runnable in journey.walk.advance():
            stage = self.stages[runnable.stage]
            work = Work(journey, runnable, deadline=journey.deadline, now=now)
            refusal = stage.turned_away(work, now)
            if refusal is not None:
                self._refuse(journey, refusal)
                return
            journey.works[runnable.stage] = work
            stage.enqueue(work)
        if journey.walk.finished:
            self._answer(journey)

    def _answer(self, journey: SimulatedJourney) -> None:
        latency = self.agenda.now - journey.arrived_at + self.scenario.conditions.after_seconds
        index, journey.done = journey.index, True
        self.latency[index], self.accuracy[index] = latency, journey.accuracy
        self.variants[index] = journey.variants
        self.rows.record(self.agenda.now, journey.rows_by_stage)
        self._end(index, OK if latency <= self.scenario.pipeline.spec.slo.latency_seconds else LATE)

    def _refuse(self, journey: SimulatedJourney, refusal: Refusal) -> None:
        index, journey.done = journey.index, True
        for stage, work in journey.works.items():
            self.stages[stage].queue.discard(work)
        journey.works = {}
        self.latency[index] = self.agenda.now - journey.arrived_at
        self.reasons[index] = (refusal.stage, refusal.reason)
        self._end(index, refusal.end)

    def _end(self, index: int, end: End) -> None:
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
        if newest and outgrown(self.plan, newest[-1], self.scenario.pipeline.spec.adaptation.headroom):
            self._decide()

    def _note(self, at_seconds: float) -> None:
        stages = {
            name: (stage.variant, stage.plan.batch_size, stage.ready_replicas, stage.queue.rows)
            for name, stage in self.stages.items()
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
        counts, self.asked_at = self.counter.history(now, seconds_to_ask(now - self.asked_at)), now
        load = Load(adaptation.origin_seconds + now, tuple(float(count) for count in counts))
        ratios = {(name, stage.variant): stage.service_ratio for name, stage in self.stages.items()}
        rows = self.rows.per_request(now)
        try:
            plan = adaptation.tick(scenario.pipeline, scenario.profiles, self.plan, load, rows, ratios)
        except (ObservationError, PlanningError):
            return  # the plan in force is held, as the adapter holds it
        self.plans.append(plan)
        self.plan = plan
        self.agenda.at(now + scenario.conditions.reaction_seconds, partial(self._put_in_force, plan))

    def _publish(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.plans.append(plan)
        self._put_in_force(plan)

    def _put_in_force(self, plan: PipelinePlan) -> None:
        for name, stage in self.stages.items():
            stage.follow(plan.spec.stage(name))
        self.fleet.follow(plan)

    def _fail(self, stage: str) -> None:
        self.fleet.lose_one(stage)

    def _outcome(self, mean_cores: float) -> Simulated:
        return Simulated(
            arrivals_seconds=self.scenario.arrivals_seconds,
            latency_seconds=np.array(self.latency),
            ends=np.array(self.ends, dtype=np.int8),
            accuracy=np.array(self.accuracy),
            reasons=self.reasons,
            variants=tuple(self.variants),
            seconds=tuple(self.seconds),
            plans=tuple(self.plans),
            mean_cores=mean_cores,
            batch_rows={name: s.batches.rows / max(s.batches.sent, 1) for name, s in self.stages.items()},
            starts=self.fleet.starts,
            duration_seconds=self.scenario.duration_seconds,
        )
