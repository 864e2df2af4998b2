"""The ways to run a stage that are worth considering, and the program they make. Pure.

Per stage every variant × operating point × batch size, with the fewest replicas that carry the load; what is pinned,
bounded, not profiled, or more than one request to a replica can hold falls away. The option that runs now stays one,
even with more replicas than needed, and is the only one without the price of a change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

from trimtab_adapter.planning.latency import backlog_seconds, least_replicas, planned_seconds, sustained_load_rps
from trimtab_adapter.solvers.program import Option, Program, StageOptions, weights_of
from trimtab_pipelines.accuracy import stage_values, value_of
from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.mistakes import Failed
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, most_rows
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import ModelProfile, PointProfile
from trimtab_pipelines.second_look import LookPlan
from trimtab_pipelines.spec import InferencePipelineSpec, ServiceLevel
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant


class PlanningError(Failed):
    """The pipeline and its profiles do not fit together; the message names the stage and what is missing."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is wanted for: a load in requests per second, and what was measured of the world."""

    spec: InferencePipelineSpec
    profiles: Mapping[str, ModelProfile]
    load_rps: float
    rows_per_request: Mapping[str, float] = field(default_factory=dict)  # measured; else as the spec expects
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by stage and variant
    current: PipelinePlan | None = None
    strain: float = 1.0  # over profiled times of who writes
    drifts: tuple[str, ...] = ()  # which accuracies of the spec are observed ones, in words
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)  # measured; else as profiled

    @property
    def busiest_rps(self) -> float:
        """The requests of the busiest second, headroom included."""
        return self.load_rps * (1.0 + self.spec.adaptation.headroom)

    def stage_rps(self, stage: str) -> float:
        """The rows per second a stage must carry, headroom included."""
        return self.busiest_rps * self.rows(stage)

    def sustained_stage_rps(self, stage: str) -> float:
        """The rows per second that keep coming where the busiest second brings `stage_rps`."""
        return sustained_load_rps(self.busiest_rps, self.spec.adaptation.horizon_seconds) * self.rows(stage)

    def rows(self, stage: str) -> float:
        """The rows a request brings to a stage, as measured or else as expected."""
        known = self.rows_per_request.get(stage)
        if known is None or (not known and not self.spec.stage(stage).encodes):  # chats may well show nothing
            return self.spec.expected_rows[stage]
        return known

    def images(self, stage: str) -> float:
        """The images a chat shows, for who writes; 1, as was measured, where the pipeline does not tell."""
        encoder = next((reads for reads in _reads(self.spec.stage(stage)) if self.spec.stage(reads).encodes), None)
        return 1.0 if encoder is None else self.rows(encoder)

    def offered(self, stage: Stage) -> str:
        """Say in a few words which prompts a stage that writes is planned for; nothing where nobody measured them."""
        tokens = self.prompt_tokens.get(stage.name, 0.0)
        if not stage.writes or not tokens:
            return ""
        return f"{stage.name}: prompts of {tokens:.3g} tokens, {tokens * self.stage_rps(stage.name):.3g} a second"

    @property
    def promise(self) -> tuple[str, float]:
        """What is planned for, and its seconds: of who writes the first piece, where it was measured."""
        slo, writers = self.spec.slo, [stage for stage in self.spec.stages if stage.writes]
        if slo.first_token_seconds is None or not all(self._knows_first(stage) for stage in writers):
            return "slo.latency", slo.latency_seconds
        return "slo.firstToken", slo.first_token_seconds

    def _knows_first(self, stage: Stage) -> bool:
        profile = self.profiles.get(stage.name)
        return profile is not None and all(point.chats is not None for point in profile.spec.points)

    def running(self, stage: str) -> StagePlan | None:
        """What runs in a stage now, if anything."""
        plans = () if self.current is None else self.current.spec.stages
        return next((plan for plan in plans if plan.name == stage), None)


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Which constraints to give up, for where not all can be kept."""

    fraction: float = 1.0  # of the load
    slo_seconds: float | None = None  # in place of the pipeline's own
    floor: bool = False  # forget the accuracy floor
    sizes: bool = False  # forget pinned replicas and batch sizes
    pins: bool = False  # forget all pins


NOTHING = Relaxation()


def pose(question: Question, relaxed: Relaxation = NOTHING) -> Program:
    """The program; raises PlanningError where a stage has no profile that any of its variants could use."""
    spec = question.spec
    place = {stage.name: k for k, stage in enumerate(spec.order)}
    return Program(
        stages=tuple(
            StageOptions(
                name=stage.name,
                predecessors=tuple(sorted({place[name] for name in _reads(stage)})),
                options=tuple(_options(question, stage, relaxed)),
            )
            for stage in spec.order
        ),
        slo_seconds=question.promise[1] if relaxed.slo_seconds is None else relaxed.slo_seconds,
        cores=spec.budget.cores,
        gpus=spec.budget.gpus,
        metric=spec.objective.accuracy_metric,
        weights=weights_of(spec.objective),
        accuracy_floor=0.0 if relaxed.floor else spec.objective.accuracy_floor or 0.0,
    )


def point_profile(question: Question, stage: Stage, variant: Variant, point: OperatingPoint) -> PointProfile | None:
    """What was measured of an operating point with the cores its replicas get, or None.

    Of who writes it is for chats that show as many images as they do now, and have as many tokens.
    """
    found = question.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or not stage.writes:
        return found
    return found.showing(question.images(stage.name), question.prompt_tokens.get(stage.name, 0.0))


@dataclass(frozen=True, slots=True)
class Reads:
    """How long prompts take to be read, in seconds by tokens, and how many tokens those have that are planned for."""

    tokens: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict)


def read_by(question: Question, stage: Stage, variant: Variant, point: OperatingPoint) -> Reads:
    """What was measured of an operating point of who writes; nothing of others, and where a profile does not say."""
    found = question.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or found.chats is None or not found.chats.reading_seconds:
        return Reads()
    usual = found.chats.prompt_tokens_showing(question.images(stage.name))
    return Reads(max(usual, question.prompt_tokens.get(stage.name, 0.0)), found.chats.reading_seconds)


def keeps_to_one_point(question: Question, stage: Stage) -> bool:
    """Whether a stage runs at its planned operating point alone, by the departure policy or by a pin."""
    return not question.spec.falls_back or stage.pin.operating_point is not None


def service_ratio(question: Question, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time of a variant, as far as it may be planned with.

    A replica that asks for a fraction of a core is faster than its share while the node has time to spare. That is no
    capacity to count on: if all replicas were planned so, there would be none to spare. Of who writes it is observed to
    the first piece of a row beside others, which is no measure of how long a batch takes; there broken promises tell.
    """
    if stage.writes:
        return question.strain
    ratio = _measured_ratio(question, stage, variant, profile)
    return max(ratio, 1.0) if variant.resources.cpu < 1.0 else ratio


def _measured_ratio(question: Question, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time, of this variant or deduced from the one that runs.

    Of a variant that was never seen serving we assume the excess seconds of the one that runs now, at most in
    proportion: a slow machine slows the lighter ones alike, a fixed overhead hardly touches the heavier ones.
    """
    known = question.service_ratios.get((stage.name, variant.name))
    if known is not None:
        return known
    running = question.running(stage.name)
    if running is None or (stage.name, running.variant) not in question.service_ratios:
        return 1.0
    reference = question.profiles[stage.name].spec.point(running.variant, running.operating_point, running.cores)
    if reference is None:
        return 1.0
    share = min(1.0, reference.latency_seconds(1, 0.5) / profile.latency_seconds(1, 0.5))
    return 1.0 + (question.service_ratios[stage.name, running.variant] - 1.0) * share


def _reads(stage: Stage) -> set[str]:
    return {split_reference(tensor.source)[0] for tensor in stage.inputs} - {REQUEST}


def _pin(stage: Stage, relaxed: Relaxation) -> Pin:
    if relaxed.pins:
        return Pin()
    return stage.pin.model_copy(update={"replicas": None, "batch_size": None}) if relaxed.sizes else stage.pin


def _options(question: Question, stage: Stage, relaxed: Relaxation) -> Iterator[Option]:
    pin = _pin(stage, relaxed)
    rows = most_rows(question.spec, stage)
    if rows == 0 and not any(variant.container for variant in stage.variants):
        raise PlanningError(
            f"stage {stage.name}: one row of its inputs is more than the {MAX_BODY_BYTES} bytes that a replica takes "
            "at once; make its tensors smaller"
        )
    found = profiled_points(question, stage)
    for variant, point, profile in found:
        if pin.variant in {None, variant.name} and pin.operating_point in {None, point.name}:
            own = _Speed(profile, service_ratio(question, stage, variant, profile))
            most = variant.max_batch_size
            if rows is not None and variant.container is None:
                most = min(most, rows)
            beside = () if keeps_to_one_point(question, stage) else (one for one in found if one[0] is variant)
            others = {at.operating_point: _Speed(at, service_ratio(question, stage, variant, at)) for *_, at in beside}
            once = _Candidate(variant, point, own, (own, *others.values()), most)
            for candidate in (once, *_twice(question, once, others)):
                yield from _sizes(question, stage, relaxed, candidate)
    if stage.name in question.spec.encoders.values():
        yield _idle(question, stage)


def _idle(question: Question, stage: Stage) -> Option:
    """No replicas: who would read what it encodes reads images itself."""
    running = question.running(stage.name)
    variant = stage.variant(running.variant if running is not None else stage.pin.variant or stage.variants[0].name)
    return Option(
        variant=variant.name,
        operating_point=variant.points[0].name,
        batch_size=1,
        replicas=0,
        cores=0.0,
        gpus=0,
        accuracy=1.0,
        value=1.0,
        latency_seconds=0.0,
        throughput_rps=0.0,
        penalty=0.0 if running is None or not running.replicas else question.spec.adaptation.switching_cost,
        apart=False,
    )


def _apart(question: Question, stage: Stage, variant: Variant) -> bool | None:
    """Whether a variant is for images that are encoded apart; None where there is no such choice."""
    if stage.parts:
        return not variant.whole
    return True if stage.name in question.spec.encoders.values() else None


def profiled_points(question: Question, stage: Stage) -> list[tuple[Variant, OperatingPoint, PointProfile]]:
    """The variants and operating points of a stage that were profiled with the cores they get."""
    if stage.name not in question.profiles:
        raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
    found = [
        (variant, point, profile)
        for variant in stage.variants
        for point in variant.points
        if (profile := point_profile(question, stage, variant, point)) is not None
    ]
    if not found:
        wanted = ", ".join(f"{v.name} with {v.resources.cpu:g} cores" for v in stage.variants)
        raise PlanningError(f"stage {stage.name}: its profile measured none of: {wanted}; profile it anew")
    return found


class _Pace(Protocol):
    """How fast rows are answered in one way."""

    def replica_rps(self, batch_size: int) -> float:
        """Return rows per second of one replica."""

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Return the service time of a full batch."""


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast an operating point is here and now: as measured, and observed over profiled service time."""

    profile: PointProfile
    service_ratio: float

    def replica_rps(self, batch_size: int) -> float:
        """Rows per second of one replica."""
        return self.profile.throughput_rps(batch_size) / self.service_ratio

    def seconds(self, batch_size: int, quantile: float) -> float:
        """The service time of a full batch, until its answers begin."""
        return self.profile.until_first.latency_seconds(batch_size, quantile) * self.service_ratio

    def goes_on_in_time(self, batch_size: int, slo: ServiceLevel) -> bool:
        """Whether answers, once begun, keep their pace and are whole in time; of who does not write it is not asked."""
        chats = self.profile.chats
        if chats is None or slo.first_token_seconds is None:
            return True
        whole, begun = (one.latency_seconds(batch_size, 0.5) for one in (self.profile, self.profile.until_first))
        pace = (whole - begun) / max(chats.tokens - 1.0, 1.0)
        kept = slo.per_token_seconds is None or pace <= slo.per_token_seconds
        return kept and self.profile.latency_seconds(batch_size, slo.quantile) <= slo.latency_seconds


@dataclass(frozen=True, slots=True)
class _Twice:
    """Every row at one point, and a share of them at another after that."""

    first: _Pace
    again: _Pace
    share: float

    def replica_rps(self, batch_size: int) -> float:
        """Return rows per second of one replica; those looked at again are gathered to full batches."""
        return 1.0 / (1.0 / self.first.replica_rps(batch_size) + self.share / self.again.replica_rps(batch_size))

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Return the service time of a full batch, and of its least certain rows after it."""
        return self.first.seconds(batch_size, quantile) + self.again.seconds(ceil(self.share * batch_size), quantile)


def _twice(question: Question, once: "_Candidate", others: Mapping[str, _Speed]) -> "Iterator[_Candidate]":
    """Yield the candidate with each second look that its departure policy may take."""
    if question.spec.looks_twice:
        for look in once.point.looks(question.spec.objective.accuracy_basis):
            if look.point in others and look.share > 0:
                yield replace(once, own=_Twice(once.own, others[look.point], look.share), look=look)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way to answer that may be planned, and all that batches may then run at.

    `look`: the least certain rows are answered again.
    """

    variant: Variant
    point: OperatingPoint
    own: _Pace
    allowed: tuple[_Speed, ...]
    most_rows: int  # of a batch
    look: LookPlan | None = None

    def most_rps(self, batch_size: int) -> float:
        """Rows per second of one replica at the fastest point allowed."""
        return max(speed.replica_rps(batch_size) for speed in self.allowed)

    def runs_in(self, plan: StagePlan) -> bool:
        """Whether a plan runs it, in batches of whatever size."""
        return (self.variant.name, self.point.name, self.look) == (plan.variant, plan.operating_point, plan.escalation)


def _sizes(question: Question, stage: Stage, relaxed: Relaxation, candidate: _Candidate) -> Iterator[Option]:
    """Yield the batch sizes of an operating point, each with its least replicas, and what runs now.

    The fastest point allowed must carry the busiest second, the planned one what keeps coming: so that it is the
    planned point's accuracy that most requests get, and nobody pays for replicas that a peak alone would need.
    """
    pin, running = _pin(stage, relaxed), question.running(stage.name)
    if running is not None and not candidate.runs_in(running):
        running = None
    load_rps = question.stage_rps(stage.name) * relaxed.fraction
    sustained_rps = question.sustained_stage_rps(stage.name) * relaxed.fraction
    utilisation = question.spec.adaptation.target_utilization
    for batch_size in batch_sizes(question.spec, stage, pin):
        if batch_size > candidate.most_rows or not candidate.allowed[0].goes_on_in_time(batch_size, question.spec.slo):
            continue
        least = max(
            least_replicas(load_rps, candidate.most_rps(batch_size), utilisation),
            least_replicas(sustained_rps, candidate.own.replica_rps(batch_size), utilisation),
            stage.min_replicas,
        )
        counts = {least} if pin.replicas is None else {pin.replicas}
        if running is not None and running.batch_size == batch_size and pin.replicas is None:
            counts.add(running.replicas)
        for replicas in sorted(counts):
            if least <= replicas <= stage.max_replicas:
                yield _option(question, stage, candidate, batch_size, replicas, sustained_rps)


def batch_sizes(spec: InferencePipelineSpec, stage: Stage, pin: Pin) -> list[int]:
    """The batch sizes to choose from, ascending; none is larger than what the departure policy sends."""
    asked = stage.batch_sizes if pin.batch_size is None else (pin.batch_size,)
    most = _most_rows(spec, stage)
    return sorted({size if most is None else min(size, most) for size in asked})


def capped(spec: InferencePipelineSpec) -> tuple[str, ...]:
    """Say of which stages batches are smaller than asked for, and why."""
    return tuple(
        f"{stage.name}: batches of {most} rows at most and not {largest}: {spec.departure_policy} sends no more"
        for stage in spec.stages
        for largest in [max(stage.batch_sizes if stage.pin.batch_size is None else (stage.pin.batch_size,))]
        for most in [_most_rows(spec, stage)]
        if most is not None and largest > most
    )


def _most_rows(spec: InferencePipelineSpec, stage: Stage) -> int | None:
    """Rows of a stage's largest batch; None where nothing bounds them. Rows that are written leave one by one."""
    return None if stage.writes else spec.most_batch_rows


def _option(
    question: Question, stage: Stage, candidate: _Candidate, batch_size: int, replicas: int, sustained_rps: float
) -> Option:
    variant, point, look = candidate.variant, candidate.point, candidate.look
    quantile, running = question.spec.slo.quantile, question.running(stage.name)
    asked = (batch_size, replicas)
    kept = running is None or (candidate.runs_in(running) and asked == (running.batch_size, running.replicas))
    carried_rps = replicas * candidate.own.replica_rps(batch_size)
    backlog = backlog_seconds(sustained_rps, carried_rps, quantile, question.rows(stage.name))
    objective = question.spec.objective
    if look is None:
        accuracy = point.judged().on(objective.accuracy_basis)
        value = stage_values(stage, objective)[variant.name, point.name]
    else:
        accuracy, value = look.accuracy, value_of(stage, objective, look.accuracy)
    return Option(
        variant=variant.name,
        operating_point=point.name,
        batch_size=batch_size,
        replicas=replicas,
        cores=replicas * variant.resources.cpu,
        gpus=replicas * variant.resources.gpu,
        accuracy=accuracy,
        value=value,
        latency_seconds=_latency_seconds(question, stage, candidate, batch_size, replicas, backlog),
        throughput_rps=replicas * candidate.most_rps(batch_size),
        penalty=0.0 if kept else question.spec.adaptation.switching_cost,
        escalation=look,
        apart=_apart(question, stage, variant),
    )


def _latency_seconds(
    question: Question, stage: Stage, candidate: _Candidate, batch_size: int, replicas: int, backlog: float
) -> float:
    """Of a row in a stage; who writes has a place for each of so many rows, and none waits for a batch to end."""
    quantile = question.spec.slo.quantile
    service = candidate.own.seconds(batch_size, quantile)
    if stage.writes and question.promise[0] == "slo.firstToken":
        return service + backlog
    transfer = stage.transfer_seconds if stage.encodes else 0.0
    return planned_seconds(service, replicas, backlog, quantile) + transfer
