"""One model at many speeds, in simulated time: utility and what becomes of queries, by policy."""

import numpy as np
import pytest

from benchmarks.otas import load
from benchmarks.otas.ceiling import ceiling
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Source, measure
from benchmarks.otas.evaluation import Evaluation, judge
from benchmarks.otas.measured import Cell
from benchmarks.otas.methods import INFAAS, METHODS, OTAS, OURS, PETS, PROMPTS, TOME, VPT
from benchmarks.otas.page import render

SHORT = Source(load.bursty_rps(None, 0, 5))


@pytest.fixture(scope="module")
def overloaded():
    """A rate above what the plain model carries."""
    return {name: measure(SHORT, Cell(SYNTHETIC, name, 1.6)) for name in (OURS, OTAS, PETS, INFAAS, TOME, VPT)}


def test_ours_has_more_utility_than_every_other_in_overload(overloaded):
    best = max(one.utility for name, one in overloaded.items() if name != OURS)

    assert overloaded[OURS].utility > best


def test_every_query_is_of_one_type(overloaded):
    for one in overloaded.values():
        assert sum(one.types) == pytest.approx(1.0)
        assert min(one.types) >= -1e-9


def test_policy_without_deadlines_is_late_and_fixed_one_stays(overloaded):
    assert overloaded[PETS].types[2] > 0.1
    assert set(overloaded[TOME].shares) == {"g-15"}
    assert len(overloaded[OURS].shares) > 2


def test_a_model_that_must_be_loaded_keeps_its_queries_waiting():
    one = measure(SHORT, Cell(SYNTHETIC, INFAAS, 1.0))

    assert {"small", "base"} <= set(one.shares)
    assert one.types[2] + one.types[3] > 0.02


def test_prompts_trained_with_merging_raise_utility_under_load(overloaded):
    one = measure(SHORT, Cell(SYNTHETIC, PROMPTS, 1.6))

    assert {name for name in one.shares if "aware" in name}
    assert one.utility > overloaded[OURS].utility


def test_the_loads_are_the_papers():
    synthetic = load.synthetic_rps(2000, 1)
    bursty = load.bursty_rps(None, 0, 2000)

    assert synthetic.min() >= 200.0
    assert synthetic.max() <= 700.0
    assert np.quantile(bursty, 0.6) == pytest.approx(300.0)
    assert bursty.max() > 600.0


def test_the_page_and_the_verdict_name_every_method():
    short = Source(load.bursty_rps(None, 0, 2))
    cells = [Cell(workload, method) for workload in (SYNTHETIC, BURSTY) for method in METHODS]
    ceilings = [ceiling(short, cell) for cell in cells if cell.method == OURS]
    evaluation = Evaluation([measure(short, cell) for cell in cells], ceilings, "made up")
    html, outcome = render(evaluation), judge(evaluation)

    assert all(method in html for method in METHODS)
    assert len(outcome.bars) == 5
    assert {"synthetic_otas_utility", "bursty_gain_over_vpt_2"} <= outcome.figures.keys()
    assert all(evaluation.of_ceiling(BURSTY, name) <= 1 + 1e-9 for name in METHODS if METHODS[name].is_the_papers)
    assert {"synthetic_otas_of_ceiling", "bursty_most_gain_over_otas"} <= outcome.figures.keys()
    assert "synthetic_infaas_like_of_ceiling" not in outcome.figures, "other models have another ceiling"
    assert evaluation.most_gain(SYNTHETIC, OTAS) >= evaluation.gain(SYNTHETIC, OTAS) - 1e-9
