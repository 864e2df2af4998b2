"""`python -m benchmarks.otas`: OTAS's evaluation anew, simulated; a table, a page with plots, a line of JSON.

With `--served` a real transformer is served too, by each method under both loads, in some ten minutes.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.evaluating import concluded, simulated, start_of, trace_of
from benchmarks.otas import load, page
from benchmarks.otas.beside import HEADS as SERVED_HEADS
from benchmarks.otas.beside import Beside
from benchmarks.otas.ceiling import Ceiling, ceiling
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Source, measure
from benchmarks.otas.evaluation import Evaluation, cells, judge
from benchmarks.otas.measured import Measured
from benchmarks.otas.methods import OURS
from benchmarks.otas.served import serve_all
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab.plan_view import terminal_table
from trimtab_protocol import event_loop

FACTORS = (0.75, 1.0, 1.25)


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds, 2 for a trace that cannot be."""
    return run_reporting_errors(partial(_evaluate, _parse()))


def _evaluate(given: argparse.Namespace) -> int:
    trace = trace_of(given.trace, given.data / load.TRACE, "bursts are made up")
    start_seconds = start_of(given.trace_start, given.trace, load.START_SECONDS)
    source = Source(load.bursty_rps(trace, start_seconds, given.seconds))
    wanted = cells(FACTORS, given.seeds, (SYNTHETIC, BURSTY))
    found = simulated(partial(measure, source), wanted, given.processes, _named)
    loads = [cell for cell in wanted if cell.method == OURS]
    ceilings = simulated(partial(ceiling, source), loads, given.processes, _bounded)
    served = _served(given, trace, start_seconds) if given.served else None
    evaluation = Evaluation(
        found, ceilings, "made up" if trace is None else f"{trace.name}, from second {start_seconds}"
    )
    rows = page.result_rows(evaluation)
    outcome = judge(evaluation) if served is None else judge(evaluation, served.figures(), served.bars())
    if served is not None:
        console.print(terminal_table(SERVED_HEADS, served.rows(), "served"))
    return concluded(given.out / "otas.html", page.render(evaluation, served), page.HEADS, rows, outcome)


def _served(given: argparse.Namespace, trace: Path | None, start_seconds: int) -> Beside:
    source = Source(load.bursty_rps(trace, start_seconds, given.served_seconds))
    return event_loop.run(serve_all(source, given.deadline, given.out, console.print))


def _named(one: Measured) -> str:
    return f"{one.cell.workload} {one.cell.method}"


def _bounded(one: Ceiling) -> str:
    return f"the most of {one.cell.workload} × {one.cell.factor:g}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.otas", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the Twitter trace")
    parser.add_argument("--trace", type=Path, help="another trace of requests per second, for the bursty load")
    parser.add_argument("--trace-start", type=int, help="its second at which to begin (default: 0 of another trace)")
    parser.add_argument("--seconds", type=int, default=60, help="of each load")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--served", action="store_true", help="serve a real transformer too, by each method")
    parser.add_argument("--served-seconds", type=int, default=30, help="of each load that is served")
    parser.add_argument("--deadline", type=float, default=1.2, help="seconds, of served queries in a hurry")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/otas"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
