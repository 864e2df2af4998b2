"""`python -m benchmarks.otas`: OTAS's evaluation anew, simulated; a table, a page with plots, a line of JSON."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.evaluating import concluded, simulated
from benchmarks.otas import load, page
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Measured, Source, measure
from benchmarks.otas.evaluation import Evaluation, cells, judge

FACTORS = (0.75, 1.0, 1.25)


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds."""
    given = _parse()
    trace = given.trace or given.data / load.TRACE
    if not trace.exists():
        sys.stderr.write(f"{trace} is missing: bursts are made up; --data FOLDER names the trace's\n")
        trace = None
    source = Source(trace, given.trace_start, given.seconds)
    wanted = cells(FACTORS, given.seeds, (SYNTHETIC, BURSTY))
    found = simulated(partial(measure, source), wanted, given.processes, _named)
    evaluation = Evaluation(found, "made up" if trace is None else f"{trace.name}, from second {given.trace_start}")
    rows = page.result_rows(evaluation)
    return concluded(given.out / "otas.html", page.render(evaluation), page.HEADS, rows, judge(evaluation))


def _named(one: Measured) -> str:
    return f"{one.cell.workload} {one.cell.method}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.otas", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the Twitter trace")
    parser.add_argument("--trace", type=Path, help="another trace of requests per second, for the bursty load")
    parser.add_argument("--trace-start", type=int, default=load.START_SECONDS, help="its second at which to begin")
    parser.add_argument("--seconds", type=int, default=60, help="of each load")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/otas"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
