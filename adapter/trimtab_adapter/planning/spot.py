"""`spot_note`: what replicas on spot nodes save, and what remains of the plan if those nodes go."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program
from trimtab_pipelines.replica_groups import group_of
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage


def spot_note(solved: PlanSolution, spec: InferencePipelineSpec) -> str:
    """One line for people; empty if the plan uses no spot flavor."""
    on_spot, remaining = 0.0, []
    for option, stage in zip(solved.solution.choice, _stages(solved.program, spec), strict=True):
        counts = [(variant, count) for variant, count in _groups(option) if _is_spot(spec, stage, variant)]
        on_spot += sum(count * group_of(stage, variant).cost_per_hour(spec) for variant, count in counts)
        total = sum(count for _, count in _groups(option))
        remaining.append(f"{stage.name} {total - sum(count for _, count in counts)} of {total}")
    if not on_spot:
        return ""
    now = _figures(solved.solution.choice)
    left = f"replicas left if their nodes go: {', '.join(remaining)}"
    return f"spot: {on_spot:.4g} an hour of {now}; without spot {_without(solved.program, spec)}; {left}"


def _without(program: Program, spec: InferencePipelineSpec) -> str:
    """Cost and accuracy of the best plan without spot flavors."""
    stages = tuple(
        replace(options, options=tuple(each for each in options.options if not _uses_spot(spec, stage, each)))
        for options, stage in zip(program.stages, _stages(program, spec), strict=True)
    )
    best = solve(replace(program, stages=stages)) if all(stage.options for stage in stages) else None
    return "no plan meets all constraints" if best is None else _figures(best.choice)


def _figures(choice: Sequence[Option]) -> str:
    accuracy = math.prod(option.accuracy for option in choice)
    return f"{sum(option.cost for option in choice):.4g} (accuracy {accuracy:.4f})"


def _stages(program: Program, spec: InferencePipelineSpec) -> list[Stage]:
    return [spec.stage(stage.name) for stage in program.stages]


def _uses_spot(spec: InferencePipelineSpec, stage: Stage, option: Option) -> bool:
    return any(_is_spot(spec, stage, variant) for variant, _ in _groups(option))


def _is_spot(spec: InferencePipelineSpec, stage: Stage, variant: str) -> bool:
    return spec.flavor(stage.variant(variant)).spot


def _groups(option: Option) -> Iterator[tuple[str, int]]:
    """Variant and number of replicas of each replica group."""
    yield option.variant, option.replicas
    yield from ((group.variant, group.replicas) for group in option.other_groups)
