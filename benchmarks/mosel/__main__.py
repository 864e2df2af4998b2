"""`python -m benchmarks.mosel`: MOSEL's evaluation anew, simulated; a table, a page with plots, a line of JSON.

With `--served` its policies also serve digits-av, beside what the simulator says of the same jobs.
"""

import argparse
import os
import sys
from functools import partial
from math import inf
from pathlib import Path

from benchmarks.evaluating import concluded, simulated, start_of, trace_of
from benchmarks.mosel import load, page, served_page, serving
from benchmarks.mosel.beside import with_served
from benchmarks.mosel.cells import METHODS, OURS, Cell, Measured, Source, measure
from benchmarks.mosel.evaluation import Evaluation, judge
from benchmarks.mosel.models import MODELS
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab.plan_view import terminal_table
from trimtab_protocol import event_loop

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MISJUDGED = (0.5, 1.0, 1.5)
MISJUDGED_FACTOR = 0.5


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds, 2 for a trace that cannot be."""
    return run_reporting_errors(partial(_evaluate, _parse()))


def _evaluate(given: argparse.Namespace) -> int:
    trace = trace_of(given.trace, given.data / load.TRACE, "a load of the same shape is made up")
    start_seconds = start_of(given.trace_start, given.trace, load.START_SECONDS)
    source = Source(load.shape(trace, start_seconds, given.seconds))
    if given.served:  # what cannot be served is told before minutes of simulating
        goes, options = load.shape(trace, start_seconds, given.served_seconds), serving.drawn(given.recordings)
    found = simulated(partial(measure, source), _cells(given.seeds), given.processes, _named)
    evaluation = Evaluation(found, "made up" if trace is None else f"{trace.name}, from second {start_seconds}")
    rows, outcome = page.result_rows(evaluation), judge(evaluation)
    if not given.served:
        return concluded(given.out / "mosel.html", page.render(evaluation), page.HEADS, rows, outcome)
    beside = event_loop.run(serving.beside(goes, evaluation.trace, options, given.loads, given.cores, given.out))
    console.print(terminal_table(served_page.HEADS, served_page.result_rows(beside), "digits-av, served"))
    console.print(terminal_table(served_page.SUM_HEADS, served_page.sum_rows(beside), "digits-av, over all loads"))
    outcome = with_served(outcome, beside)
    return concluded(given.out / "mosel.html", page.render(evaluation, beside), page.HEADS, rows, outcome)


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
    parser.add_argument("--served", action="store_true", help="serve digits-av, too, by five policies")
    parser.add_argument("--recordings", type=Path, help="folder of real recordings to serve; else synthesised voices")
    parser.add_argument("--loads", type=_loads, default=(0.25, 0.5, 1.0, 2.0), help="to serve, as 0.25,0.5,1,2")
    parser.add_argument("--served-seconds", type=int, default=30, help="of each load that is served")
    parser.add_argument("--cores", type=float, default=0.25, help="that each replica is held to")
    parser.add_argument("--out", type=Path, default=Path("out/mosel"))
    return parser.parse_args()


def _loads(written: str) -> tuple[float, ...]:
    """Loads as multiples of the paper's, ascending.

    Raises:
        ArgumentTypeError: one is no number above 0.
    """
    try:
        loads = tuple(sorted({float(each) for each in written.split(",")}))
    except ValueError:
        loads = ()
    if not loads or not all(0 < each < inf for each in loads):
        raise argparse.ArgumentTypeError(f"{written!r} are no loads: write numbers above 0, as 0.25,0.5,1,2")
    return loads


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
