"""`PlanningProblem`: everything a plan is computed from: a pipeline, its profiles, measurements and a load.

Its profiles are adjusted to the current chats and service times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.flavors import DEFAULT_NAME
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import ModelProfile, PointProfile
from trimtab_pipelines.replica_groups import memory_bytes, replica_groups
from trimtab_pipelines.spec import InferencePipelineSpec, RouterSettings
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

ROUTER_UTILIZATION = 0.6
"""Planned share of a router's core; the rest absorbs bursts, since all requests wait for the same thread."""
ROUTER_RELEASE_MARGIN = 0.25
"""Load, in routers, by which fewer routers must suffice before one is released."""


ProfiledPoint = tuple[Variant, OperatingPoint, PointProfile]


class PlanningError(OperationFailed):
    """The pipeline and its profiles do not fit together; the message names the stage and what is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """A pipeline, its profiles, measurements and the load to plan for, in requests per second."""

    spec: InferencePipelineSpec
    profiles: Mapping[str, ModelProfile]
    load_rps: float
    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    """Measured rows per request by stage; the pipeline's expected rows for the others."""
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Observed over profiled service time, by stage and variant."""
    current: PipelinePlan | None = None
    slowdown: float = 1.0
    """Factor on the profiled times of generation stages."""
    drifted_accuracies: tuple[str, ...] = ()
    """Accuracies that were replaced by observed ones, as phrases for the explanation."""
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    """Measured prompt tokens by generation stage; the profiled number for the others."""
    router_cpu_seconds: float = 0.0
    """Measured CPU time of a router for a request; 0 if unmeasured."""
    changed_shares: tuple[str, ...] = ()
    """Shares of escalated rows that were replaced by observed ones, as phrases for the explanation."""
    solved: dict[object, Any] = field(default_factory=dict, init=False, repr=False)
    """Solutions that `relaxation` computed for this problem, by what was relaxed."""

    @property
    def busiest_rps(self) -> float:
        """Requests in the busiest second, headroom included."""
        return self.load_rps * (1.0 + self.spec.adaptation.headroom)

    @property
    def routers(self) -> int:
        """The routers that carry the busiest second."""
        current = 1 if self.current is None else self.current.spec.routers
        return required_routers(self.spec.router, self.busiest_rps, self.router_cpu_seconds, current)

    def stage_rps(self, stage: str) -> float:
        """Rows per second a stage must carry in the busiest second, headroom included."""
        return self.busiest_rps * self.rows(stage)

    def sustained_stage_rps(self, stage: str) -> float:
        """Rows per second that a stage receives on average if the busiest second brings `stage_rps`."""
        return sustained_load_rps(self.busiest_rps, self.spec.adaptation.horizon_seconds) * self.rows(stage)

    def rows(self, stage: str) -> float:
        """Rows per request at a stage, measured or else expected."""
        measured = self.rows_per_request.get(stage)
        if measured is None or (not measured and not self.spec.stage(stage).encodes):  # a chat may have no image
            return self.spec.expected_rows[stage]
        return measured

    def images(self, stage: str) -> float:
        """Images per chat for a generation stage; 1 if the pipeline has no encoder, as in the profile."""
        encoder = next((name for name in predecessors(self.spec.stage(stage)) if self.spec.stage(name).encodes), None)
        return 1.0 if encoder is None else self.rows(encoder)

    def prompt_load_note(self, stage: Stage) -> str:
        """Describe the prompts a generation stage is planned for; empty if they were not measured."""
        tokens = self.prompt_tokens.get(stage.name, 0.0)
        if not stage.generates or not tokens:
            return ""
        tokens_per_second = tokens * self.stage_rps(stage.name)
        return f"{stage.name}: prompts of {tokens:.3g} tokens, {tokens_per_second:.3g} tokens/s"

    @property
    def latency_target(self) -> tuple[str, float]:
        """Name and seconds of the latency SLO: time to first token if set and profiled, else the latency."""
        slo, generation_stages = self.spec.slo, [stage for stage in self.spec.stages if stage.generates]
        if slo.time_to_first_token_seconds is None or not all(
            self._has_first_token_times(stage) for stage in generation_stages
        ):
            return "slo.latency", slo.latency_seconds
        return "slo.timeToFirstToken", slo.time_to_first_token_seconds

    def _has_first_token_times(self, stage: Stage) -> bool:
        profile = self.profiles.get(stage.name)
        return profile is not None and all(point.chats is not None for point in profile.spec.points)

    def running(self, stage: str) -> StagePlan | None:
        plans = () if self.current is None else self.current.spec.stages
        return next((plan for plan in plans if plan.name == stage), None)


def point_profile(
    problem: PlanningProblem, stage: Stage, variant: Variant, point: OperatingPoint
) -> PointProfile | None:
    """The profile of an operating point with its replicas' cores, for the current chats if the stage generates."""
    profile = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if profile is None or not stage.generates:
        return profile
    return profile.for_chats(problem.images(stage.name), _prompt_tokens(problem, stage, profile))


def _prompt_tokens(problem: PlanningProblem, stage: Stage, profile: PointProfile) -> float:
    """Mean prompt tokens at an operating point; routers report those at the planned one; 0 if unknown.

    Points differ in the tokens of an image as they do in the profile.
    """
    tokens, running = problem.prompt_tokens.get(stage.name, 0.0), problem.running(stage.name)
    if not tokens or running is None:
        return tokens
    planned = problem.profiles[stage.name].spec.point(running.variant, running.operating_point, running.cores)
    images = problem.images(stage.name)
    own, observed = (
        0.0 if p is None or p.chats is None else p.chats.mean_prompt_tokens(images) for p in (profile, planned)
    )
    return tokens + own - observed if own and observed else tokens


def profiled_points(problem: PlanningProblem, stage: Stage) -> list[ProfiledPoint]:
    """The variants and operating points of a stage that were profiled with the cores they get."""
    if stage.name not in problem.profiles:
        raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
    profiled = [
        (variant, point, profile)
        for variant in _variants_that_fit(problem.spec, stage)
        for point in variant.points
        if (profile := point_profile(problem, stage, variant, point)) is not None
    ]
    if not profiled:
        wanted = ", ".join(f"{v.name} with {v.resources.cpu:g} cores" for v in stage.variants)
        raise PlanningError(f"stage {stage.name}: its profile contains none of: {wanted}; profile it again")
    return profiled


def _variants_that_fit(spec: InferencePipelineSpec, stage: Stage) -> tuple[Variant, ...]:
    """Variants whose replica groups fit into a node of their flavor; PlanningError if there are none."""
    nodes = {flavor.name: flavor.memory for flavor in spec.flavors if flavor.memory is not None}
    if not nodes:
        return stage.variants
    needed = {name: memory_bytes(group.variants) for group in replica_groups(stage) for name in group.names}
    fitting = tuple(v for v in stage.variants if needed[v.name] <= nodes.get(v.flavor or DEFAULT_NAME, math.inf))
    if not fitting:
        least = min(stage.variants, key=lambda variant: needed[variant.name])
        raise PlanningError(
            f"stage {stage.name}: the replicas of {least.name} need {needed[least.name] / 2**20:.0f} MiB, more than a "
            f"node of flavor {least.flavor or DEFAULT_NAME} has; use a larger one or variantPlacement: Dedicated"
        )
    return fitting


def prefill_profile(
    problem: PlanningProblem, stage: Stage, variant: Variant, point: OperatingPoint
) -> tuple[float, Mapping[int, float]]:
    """The prompt tokens to plan for, and prefill seconds by tokens; nothing unless a generation stage measured them."""
    found = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or found.chats is None or not found.chats.prefill_seconds:
        return 0.0, {}
    usual = found.chats.mean_prompt_tokens(problem.images(stage.name))
    return max(usual, _prompt_tokens(problem, stage, found)), found.chats.prefill_seconds


def service_ratio(problem: PlanningProblem, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time of a variant, limited to what may be planned with.

    A replica with a fraction of a core is faster than its share while the node has idle time. That is no capacity to
    plan with: if all replicas relied on it, there would be none. The ratio observed for a generation stage covers the
    first token of a row among others, which does not measure a whole batch; its slowdown estimate is used instead.
    Encoders get that slowdown too, so that a disaggregated placement does not look better by comparison.
    """
    if stage.generates:
        return problem.slowdown
    ratio = _measured_ratio(problem, stage, variant, profile)
    if stage.encodes and problem.slowdown > 1.0:
        return max(ratio, problem.slowdown)
    return max(ratio, 1.0) if variant.resources.cpu < 1.0 else ratio


def _measured_ratio(problem: PlanningProblem, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time of this variant, or estimated from the running one.

    A variant that never served is assumed to have the running one's excess seconds, at most in proportion: a slow
    machine slows lighter variants alike, while a fixed overhead hardly affects heavier ones.
    """
    measured = problem.service_ratios.get((stage.name, variant.name))
    if measured is not None:
        return measured
    running = problem.running(stage.name)
    if running is None or (stage.name, running.variant) not in problem.service_ratios:
        return 1.0
    reference = problem.profiles[stage.name].spec.point(running.variant, running.operating_point, running.cores)
    if reference is None:
        return 1.0
    share = min(1.0, reference.latency_seconds(1, 0.5) / profile.latency_seconds(1, 0.5))
    return 1.0 + (problem.service_ratios[stage.name, running.variant] - 1.0) * share


def required_routers(settings: RouterSettings, peak_rps: float, cpu_seconds_per_request: float, current: int) -> int:
    """The routers for a load, one core each; `current` if the CPU time is unmeasured, which is 0."""
    if not cpu_seconds_per_request:
        return settings.clamp(current)
    load = peak_rps * cpu_seconds_per_request / ROUTER_UTILIZATION
    return settings.clamp(max(math.ceil(load), min(math.ceil(load + ROUTER_RELEASE_MARGIN), current)))
