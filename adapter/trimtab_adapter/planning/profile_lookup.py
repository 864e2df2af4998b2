"""What was measured of the ways to run a stage, as far as it may be planned with."""

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
    """What was measured of an operating point with the cores its replicas get, or None.

    Of who writes it is for chats that show as many images as they do now, and have as many tokens.
    """
    found = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or not stage.generates:
        return found
    return found.for_chats(problem.images(stage.name), problem.prompt_tokens.get(stage.name, 0.0))


def profiled_points(problem: PlanningProblem, stage: Stage) -> list[tuple[Variant, OperatingPoint, PointProfile]]:
    """The variants and operating points of a stage that were profiled with the cores they get."""
    if stage.name not in problem.profiles:
        raise PlanningError(f"stage {stage.name} has no profile; profile the pipeline first")
    found = [
        (variant, point, profile)
        for variant in stage.variants
        for point in variant.points
        if (profile := point_profile(problem, stage, variant, point)) is not None
    ]
    if not found:
        wanted = ", ".join(f"{v.name} with {v.resources.cpu:g} cores" for v in stage.variants)
        raise PlanningError(f"stage {stage.name}: its profile measured none of: {wanted}; profile it anew")
    return found


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """How long prompts take to be read, in seconds by tokens, and how many tokens those have that are planned for."""

    tokens: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict)


def prefill_profile(problem: PlanningProblem, stage: Stage, variant: Variant, point: OperatingPoint) -> PrefillProfile:
    """What was measured of an operating point of who writes; nothing of others, and where a profile does not say."""
    found = problem.profiles[stage.name].spec.point(variant.name, point.name, variant.resources.cpu)
    if found is None or found.chats is None or not found.chats.prefill_seconds:
        return PrefillProfile()
    usual = found.chats.mean_prompt_tokens(problem.images(stage.name))
    return PrefillProfile(max(usual, problem.prompt_tokens.get(stage.name, 0.0)), found.chats.prefill_seconds)


def service_ratio(problem: PlanningProblem, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time of a variant, as far as it may be planned with.

    A replica that asks for a fraction of a core is faster than its share while the node has time to spare. That is no
    capacity to count on: if all replicas were planned so, there would be none to spare. Of who writes it is observed to
    the first piece of a row beside others, which is no measure of how long a batch takes; there broken promises tell.
    They tell of who encodes for them, too: else a layout would look better for what is apart in it.
    """
    if stage.generates:
        return problem.slowdown
    ratio = _measured_ratio(problem, stage, variant, profile)
    if stage.encodes and problem.slowdown > 1.0:
        return max(ratio, problem.slowdown)
    return max(ratio, 1.0) if variant.resources.cpu < 1.0 else ratio


def _measured_ratio(problem: PlanningProblem, stage: Stage, variant: Variant, profile: PointProfile) -> float:
    """Observed over profiled service time, of this variant or deduced from the one that runs.

    Of a variant that was never seen serving we assume the excess seconds of the one that runs now, at most in
    proportion: a slow machine slows the lighter ones alike, a fixed overhead hardly touches the heavier ones.
    """
    known = problem.service_ratios.get((stage.name, variant.name))
    if known is not None:
        return known
    running = problem.running(stage.name)
    if running is None or (stage.name, running.variant) not in problem.service_ratios:
        return 1.0
    reference = problem.profiles[stage.name].spec.point(running.variant, running.operating_point, running.cores)
    if reference is None:
        return 1.0
    share = min(1.0, reference.latency_seconds(1, 0.5) / profile.latency_seconds(1, 0.5))
    return 1.0 + (problem.service_ratios[stage.name, running.variant] - 1.0) * share
