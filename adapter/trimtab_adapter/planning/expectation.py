"""Expectation of a plan: accuracy, shares, latency and cores of the mix of operating points that the router will run.

The planned point is the best one that carries the planned load for all requests. A router that mixes points runs better
ones while capacity remains, so the expected accuracy is that of the best mix the replicas can run, which is what the
scheduling policies approach under a steady load.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trimtab_adapter.planning.planning_problem import PlanningProblem, point_profile, service_ratio
from trimtab_adapter.solvers.program import Option, Program
from trimtab_pipelines.plan import Expectation, PointPlan, RowShare, StagePlan
from trimtab_pipelines.row_shares import AnsweredBy, mixed_rows
from trimtab_pipelines.shadow_price import RowOption, escalated_shares, row_options, seconds_per_row, upper_hull

SHARE_DIGITS = 2
"""Digits of shares: a plan whose load hardly changed stays the same."""


@dataclass(frozen=True, slots=True)
class StageExpectation:
    """Expected accuracy of a stage's rows, and their shares by the point that answers them."""

    accuracy: float
    shares: dict[AnsweredBy, float]

    @property
    def row_shares(self) -> tuple[RowShare, ...]:
        """The shares as a plan states them; empty if one point answers all rows."""
        shares = [
            RowShare(variant=key.variant, operating_point=key.operating_point, share=rounded, escalated=key.escalated)
            for key, share in self.shares.items()
            if (rounded := round(share, SHARE_DIGITS)) > 0
        ]
        return tuple(shares) if len(shares) > 1 else ()


def expectation(program: Program, choice: Sequence[Option], accuracies: Iterable[float]) -> Expectation:
    """The latency and cores of a solution's planned points, and the accuracy of the mix of points."""
    return Expectation(
        accuracy=math.prod(accuracies),
        latency_seconds=program.latency_seconds(choice),
        cores=sum(option.cores for option in choice),
        gpus=sum(option.gpus for option in choice),
        objective=program.objective(choice) + sum(option.penalty for option in choice),
    )


def stage_expectation(problem: PlanningProblem, plan: StagePlan) -> StageExpectation:
    """The best mix of a stage at the sustained load; at least the planned accuracy."""
    key, planned = (plan.variant, plan.operating_point), plan.planned_escalation
    shares = {AnsweredBy(*key): 1.0} if planned is None else escalated_shares(key, planned)
    rows_rps = problem.sustained_stage_rps(plan.name)
    if problem.spec.policy_traits.escalates and rows_rps > 0:
        accuracy, mixed = _best_mix(row_options(_in_time(problem, plan)), seconds_per_row(rows_rps, plan.replicas))
        if accuracy > plan.expected_accuracy or plan.mixed_accuracy is not None:
            return StageExpectation(max(accuracy, plan.expected_accuracy), mixed or shares)
    return StageExpectation(plan.expected_accuracy, shares)


def _best_mix(options: Sequence[RowOption], seconds: float) -> tuple[float, dict[AnsweredBy, float]]:
    """Accuracy and shares of the best mix of two options that serves every row, within these seconds per row."""
    hull = upper_hull(option for option in options if option[0] > 0)
    heavier = next((pair for pair in pairwise(hull) if seconds < pair[1][0]), None)
    if heavier is None:
        return (hull[-1][1], hull[-1][2]) if hull else (0.0, {})
    (light_seconds, light_accuracy, light), (heavy_seconds, heavy_accuracy, heavy) = heavier
    share = max(seconds - light_seconds, 0.0) / (heavy_seconds - light_seconds)
    return light_accuracy + share * (heavy_accuracy - light_accuracy), mixed_rows(light, heavy, share)


def _in_time(problem: PlanningProblem, plan: StagePlan) -> StagePlan:
    """The stage's plan with observed service times, without the points that cannot meet the SLO."""
    points = {
        name: tuple(
            _observed(problem, plan, point)
            for point in getattr(plan, name)
            if min(point.service_seconds.values(), default=0.0) <= problem.latency_target[1]
        )
        for name in ("upgrades", "fallbacks")
    }
    planned = _observed(problem, plan, plan.planned)
    return plan.replace(**points, service_seconds=planned.service_seconds)


def _observed(problem: PlanningProblem, plan: StagePlan, point: PointPlan) -> PointPlan:
    stage = problem.spec.stage(plan.name)
    variant = stage.variant(point.variant or plan.variant)
    profile = point_profile(problem, stage, variant, variant.point(point.name))
    ratio = 1.0 if profile is None else service_ratio(problem, stage, variant, profile)
    seconds = {size: seconds * ratio for size, seconds in point.service_seconds.items()}
    return point.replace(service_seconds=seconds)
