"""Tests of the options of a stage as arrays."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.adapter.problems import a_hosting_problem
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.solvers.option_table import OptionFigures, OptionTable
from trimtab_adapter.solvers.program import Option
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline


@pytest.mark.parametrize("seed", range(12))
def test_figures_are_those_of_the_options(seed: int) -> None:
    """Also while a plan runs, from which every change has its cost."""
    problem = a_hosting_problem(seed, 2, 3, flavors=2)
    pipeline = InferencePipeline(metadata=Metadata(name="sample"), spec=problem.spec)
    forecast = ForecastRecord(peak_rps=problem.load_rps, source="static")
    plan = decide(pipeline, problem.profiles, PlanningInputs(forecast, 0.0))

    running = replace(problem, current=plan)
    program = build_program(running)

    flavors = [name for name, _ in program.flavors]
    for stage in program.stages:
        assert isinstance(stage.options, OptionTable)
        read = OptionFigures.of(list(stage.options), flavors)
        for field in fields(OptionFigures):
            assert np.array_equal(getattr(read, field.name), getattr(stage.options.figures, field.name)), field.name
        assert not plan.spec.feasible or any(option.penalty == 0.0 for option in stage.options)


def test_table_takes_another_option() -> None:
    (stage,) = build_program(a_hosting_problem(0, 1, 2)).stages
    assert isinstance(stage.options, OptionTable)
    idle = Option("v0", "default", 1, 0, 0.0, 0, 0.0, 1.0, 1.0, 0.0, 0.0, disaggregated=False)

    table = stage.options.with_option(idle, ())

    assert list(table) == [*stage.options, idle]
    assert table.figures.disaggregated[-1] == 0
    with pytest.raises(IndexError):
        table[len(table)]
