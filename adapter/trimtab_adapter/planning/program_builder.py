"""Program builder: turns a `PlanningProblem` into the options per stage and the integer program over them.

Each stage has one option per variant, operating point and batch size, with the fewest replicas that carry the load, and
options with fewer replicas that serve a part of the rows at a lighter point (`mixes`).
Options that are pinned away, out of bounds, not profiled, or larger than one request to a replica are left out. The
option that runs now stays available even with more replicas than needed, and is the only one without a switching cost.
"""

from dataclasses import dataclass
from math import inf

from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.stage_options import StageBuilder
from trimtab_adapter.solvers.option_table import OptionTable
from trimtab_adapter.solvers.program import Program, StageOptions, objective_weights
from trimtab_pipelines.graph import predecessors
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The constraints to drop."""

    fraction: float = 1.0
    """Share of the load to carry."""
    slo_seconds: float | None = None
    """Replaces the pipeline's SLO."""
    floor: bool = False
    """Drop the accuracy floor."""
    sizes: bool = False
    """Drop pinned replicas and batch sizes."""
    pins: bool = False
    """Drop all pins."""


NO_RELAXATION = Relaxation()


def build_program(problem: PlanningProblem, relaxed: Relaxation = NO_RELAXATION) -> Program:
    """Build the program. Raises PlanningError if a stage has no profile that any of its variants can use."""
    spec = problem.spec
    position = {stage.name: k for k, stage in enumerate(spec.ordered_stages)}
    return Program(
        stages=tuple(
            StageOptions(
                name=stage.name,
                predecessors=tuple(sorted({position[name] for name in predecessors(stage)})),
                options=_options(problem, stage, relaxed),
            )
            for stage in spec.ordered_stages
        ),
        slo_seconds=problem.latency_target[1] if relaxed.slo_seconds is None else relaxed.slo_seconds,
        cores=spec.budget.cores,
        gpus=spec.budget.gpus,
        metric=spec.objective.accuracy_metric,
        weights=objective_weights(spec.objective),
        accuracy_floor=0.0 if relaxed.floor else spec.objective.accuracy_floor or 0.0,
        cost=inf if spec.budget.cost_per_hour is None else spec.budget.cost_per_hour,
        flavors=tuple(spec.flavor_limits.items()),
    )


def _options(problem: PlanningProblem, stage: Stage, relaxed: Relaxation) -> OptionTable:
    pin = _pin(stage, relaxed)
    sizes = batch_sizes(problem.spec, stage, pin)
    return StageBuilder.of(problem, stage, pin, sizes, relaxed.fraction).options()


def _pin(stage: Stage, relaxed: Relaxation) -> Pin:
    if relaxed.pins:
        return Pin()
    return stage.pin.replace(replicas=None, batch_size=None) if relaxed.sizes else stage.pin


def batch_sizes(spec: InferencePipelineSpec, stage: Stage, pin: Pin) -> list[int]:
    """The batch sizes to choose from, ascending; none exceeds the scheduling policy's limit."""
    sizes = stage.batch_sizes if pin.batch_size is None else (pin.batch_size,)
    limit = _max_rows(spec, stage)
    return sorted({size if limit is None else min(size, limit) for size in sizes})


def capped_batch_sizes(spec: InferencePipelineSpec) -> tuple[str, ...]:
    return tuple(
        f"{stage.name}: batches of at most {limit} rows instead of {largest}: the limit of {spec.policy_name}"
        for stage in spec.stages
        for largest in [max(stage.batch_sizes if stage.pin.batch_size is None else (stage.pin.batch_size,))]
        for limit in [_max_rows(spec, stage)]
        if limit is not None and largest > limit
    )


def _max_rows(spec: InferencePipelineSpec, stage: Stage) -> int | None:
    """Largest batch of a stage in rows; None if unlimited, as for generation stages, which do not batch rows."""
    return None if stage.generates else spec.policy_traits.max_batch_rows
