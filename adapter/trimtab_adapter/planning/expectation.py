"""Expectation of a plan: accuracy, latency and cores of the mix of operating points that the router will run.

The planned point is the best one that carries the planned load for all requests. A router that mixes points runs better
ones while capacity remains, so the expected accuracy is that of the best mix the replicas can run, which is what the
scheduling policies approach under a steady load.
"""

import math
from collections.abc import Sequence

from trimtab_adapter.planning.planning_problem import PlanningProblem, point_profile, service_ratio
from trimtab_adapter.solvers.program import Option, Program
from trimtab_pipelines.plan import Expectation, StagePlan
from trimtab_pipelines.shadow_price import best_mix, row_options, seconds_per_row


def expectation(
    problem: PlanningProblem, program: Program, choice: Sequence[Option], stages: Sequence[StagePlan]
) -> Expectation:
    """The latency and cores of a solution's planned points, and the accuracy of the mix of points."""
    return Expectation(
        accuracy=math.prod(_accuracy(problem, stage) for stage in stages),
        latency_seconds=program.latency_seconds(choice),
        cores=sum(option.cores for option in choice),
        gpus=sum(option.gpus for option in choice),
        objective=program.objective(choice) + sum(option.penalty for option in choice),
    )


def _accuracy(problem: PlanningProblem, plan: StagePlan) -> float:
    """Accuracy of a stage at the sustained load; at least the planned accuracy."""
    rows_rps = problem.sustained_stage_rps(plan.name)
    if not problem.spec.policy_traits.escalates or rows_rps <= 0:
        return plan.expected_accuracy
    stage = problem.spec.stage(plan.name)
    variant = stage.variant(plan.variant)
    profile = point_profile(problem, stage, variant, variant.point(plan.operating_point))
    ratio = 1.0 if profile is None else service_ratio(problem, stage, variant, profile)
    seconds = seconds_per_row(rows_rps, plan.replicas) / ratio
    return max(plan.expected_accuracy, best_mix(row_options(_in_time(problem, plan)), seconds)[0])


def _in_time(problem: PlanningProblem, plan: StagePlan) -> StagePlan:
    """The stage's plan without the points that cannot meet the SLO."""
    kept = {
        name: tuple(
            point for point in points if min(point.service_seconds.values(), default=0.0) <= problem.latency_target[1]
        )
        for name, points in (("upgrades", plan.upgrades), ("fallbacks", plan.fallbacks))
    }
    return plan.model_copy(update=kept)
