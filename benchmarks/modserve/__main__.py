"""`python -m benchmarks.modserve`: ModServe's evaluation anew, simulated; a table, a page, a line of JSON."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks.evaluating import concluded, simulated, trace_of
from benchmarks.modserve import load, page
from benchmarks.modserve.cells import DAY_MINUTES, Evaluation, cells, judge, measure
from trimtab.app import run_reporting_errors
from trimtab_loadtester.multimodal.rates import read_hours


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds, 2 for a trace that cannot be."""
    return run_reporting_errors(partial(_evaluate, _parse()))


def _evaluate(given: argparse.Namespace) -> int:
    trace = trace_of(given.trace, given.data / load.TRACE, "minutes are made up")
    known = given.data / load.HOURS
    split = read_hours(known) if given.trace is None and trace is not None and known.exists() else None
    hours = load.hours(trace, split, DAY_MINUTES, given.seed)
    found = simulated(partial(measure, given.seed, hours), cells(), given.processes, lambda one: one[0].runs.name)
    evaluation = Evaluation(dict(found), "made up" if trace is None else trace.name)
    rows = page.result_rows(evaluation)
    return concluded(given.out / "modserve.html", page.render(evaluation), page.HEADS, rows, judge(evaluation))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.modserve", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the paper's trace")
    parser.add_argument("--trace", type=Path, help="another trace: requests of each minute, last of its columns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/modserve"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
