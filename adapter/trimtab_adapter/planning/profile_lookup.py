"""Profile lookup: the measurements of a stage's operating points, adjusted to current chats and service times."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant


def point_profile(
    problem: PlanningProblem, stage: Stage, variant: Variant, point: OperatingPoint
) -> PointProfile | None:
    """The profile of an operating point with the cores of its replicas, or None.

    For a generation stage it is interpolated to the current images and tokens per chat.
    """
    profile = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if profile is None or not stage.generates:
        return profile
    return profile.for_chats(problem.images(stage.name), problem.prompt_tokens.get(stage.name, 0.0))


def profiled_points(problem: PlanningProblem, stage: Stage) -> list[tuple[Variant, OperatingPoint, PointProfile]]:
    """The variants and operating points of a stage that were profiled with the cores they get."""
    if stage.name not in problem.profiles:
        raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
    profiled = [
        (variant, point, profile)
        for variant in stage.variants
        for point in variant.points
        if (profile := point_profile(problem, stage, variant, point)) is not None
    ]
    if not profiled:
        wanted = ", ".join(f"{v.name} with {v.resources.cpu:g} cores" for v in stage.variants)
        raise PlanningError(f"stage {stage.name}: its profile contains none of: {wanted}; profile it again")
    return profiled


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Prefill seconds by prompt tokens, and the prompt tokens to plan for."""

    tokens: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict)


def prefill_profile(problem: PlanningProblem, stage: Stage, variant: Variant, point: OperatingPoint) -> PrefillProfile:
    """The prefill profile of a generation stage's operating point; empty for other stages and older profiles."""
    found = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or found.chats is None or not found.chats.prefill_seconds:
        return PrefillProfile()
    usual = found.chats.mean_prompt_tokens(problem.images(stage.name))
    return PrefillProfile(max(usual, problem.prompt_tokens.get(stage.name, 0.0)), found.chats.prefill_seconds)


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
