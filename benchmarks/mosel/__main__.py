"""`python -m benchmarks.mosel`: MOSEL's evaluation anew, simulated; a table, a page with plots, a line of JSON."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.evaluating import concluded, simulated, start_of, trace_of
from benchmarks.mosel import load, page
from benchmarks.mosel.cells import METHODS, OURS, Cell, Measured, Source, measure
from benchmarks.mosel.evaluation import Evaluation, judge
from benchmarks.mosel.models import MODELS
from trimtab.commands import reporting_errors

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MISJUDGED = (0.5, 1.0, 1.5)
MISJUDGED_FACTOR = 0.5


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds, 2 for a trace that cannot be."""
    return reporting_errors(partial(_evaluate, _parse()))


def _evaluate(given: argparse.Namespace) -> int:
    trace = trace_of(given.trace, given.data / load.TRACE, "a load of the same shape is made up")
    start_seconds = start_of(given.trace_start, given.trace, load.START_SECONDS)
    source = Source(load.shape(trace, start_seconds, given.seconds))
    found = simulated(partial(measure, source), _cells(given.seeds), given.processes, _named)
    evaluation = Evaluation(found, "made up" if trace is None else f"{trace.name}, from second {start_seconds}")
    rows = page.result_rows(evaluation)
    return concluded(given.out / "mosel.html", page.render(evaluation), page.HEADS, rows, judge(evaluation))


def _named(one: Measured) -> str:
    return f"{one.cell.model} {one.cell.method}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.mosel", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the Twitter trace")
    parser.add_argument("--trace", type=Path, help="another trace of requests per second")
    parser.add_argument("--trace-start", type=int, help="its second at which to begin (default: 0 of another trace)")
    parser.add_argument("--seconds", type=int, default=60, help="of the load, as the paper offers it")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/mosel"))
    return parser.parse_args()


def _cells(seeds: int) -> list[Cell]:
    grid = [
        Cell(model.name, method, factor, seed)
        for model in MODELS
        for method in METHODS
        for factor in FACTORS
        for seed in range(1, seeds + 1)
    ]
    wrong = [
        Cell(model.name, OURS, MISJUDGED_FACTOR, seed, misjudged)
        for model in MODELS
        for misjudged in MISJUDGED
        if misjudged != 1.0
        for seed in range(1, seeds + 1)
    ]
    return grid + wrong


if __name__ == "__main__":
    sys.exit(main())
