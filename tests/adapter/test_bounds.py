"""Bounds of prices and grids: no completion of a partial choice exceeds them, and those of grids are lower."""

import itertools

import numpy as np

from tests.adapter.problems import a_program
from trimtab_adapter.solvers.lagrangian_bound import LagrangianBounds, optimize_multipliers
from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import Labels, ProgramArrays, Resource, to_arrays
from trimtab_adapter.solvers.resource_bound import ResourceBound, resource_bound

COUNTED: tuple[tuple[Resource, ...], ...] = (
    ("second",),
    ("core",),
    ("floor",),
    ("second", "core"),
    ("second", "floor"),
    ("core", "floor"),
    ("gpu",),
    ("second", "gpu"),
)


def labels_of(program: Program, table: ProgramArrays, picks: np.ndarray) -> Labels:
    """The partial choices of these options, of shape [labels, stages so far]."""
    chosen = list(zip(table.columns, picks.T, table.flow, strict=False))
    nothing = np.zeros(len(picks))
    values = [column.value[pick] for column, pick, _ in chosen]
    return Labels(
        value=np.prod(values, axis=0) if table.is_product else np.sum(values, axis=0),
        cost=np.sum([column.cost[pick] for column, pick, _ in chosen], axis=0),
        cores=np.sum([column.cores[pick] for column, pick, _ in chosen], axis=0),
        gpus=np.sum([column.gpus[pick] for column, pick, _ in chosen], axis=0),
        flow_seconds=np.sum([share * column.seconds[pick] for column, pick, share in chosen], axis=0),
        same=nothing.astype(np.bool_),
        disaggregated=np.full(len(picks), -1, dtype=np.int8),
        finish=np.zeros((0, len(picks))),
        parent=nothing.astype(np.intp),
        option=nothing.astype(np.intp),
    )


def feasible_choices(program: Program, table: ProgramArrays) -> tuple[np.ndarray, np.ndarray]:
    """All choices within the constraints, of shape [choices, stages], and what they reach."""
    picks, objectives = [], []
    for pick in itertools.product(*(range(column.index.size) for column in table.columns)):
        choice = [
            stage.options[column.index[n]] for stage, column, n in zip(program.stages, table.columns, pick, strict=True)
        ]
        if program.is_feasible(choice):
            picks.append(pick)
            objectives.append(program.objective(choice))
    return np.array(picks, dtype=np.intp), np.array(objectives)


def test_no_completion_reaches_more_than_was_promised():
    promised = 0
    for seed in range(400):
        program = a_program(seed)
        table = to_arrays(program)
        picks, objectives = feasible_choices(program, table) if table is not None else (np.empty(0), np.empty(0))
        if table is None or not picks.size:
            continue
        envelopes = optimize_multipliers(program, table).bounds
        counted = [each for each in COUNTED if program.accuracy_floor or "floor" not in each]
        bounds: list[LagrangianBounds | ResourceBound] = [
            *envelopes,
            *(resource_bound(program, table, envelopes[0].prices, resources) for resources in counted),
        ]
        for stages in range(1, len(table.columns) + 1):
            labels = labels_of(program, table, picks[:, :stages])
            for bound in bounds:
                assert (bound.bound(stages, labels) >= objectives - 1e-9).all(), (seed, stages)
                promised += len(picks)
    assert promised > 10_000
