"""`python -m benchmarks.otas`: OTAS's evaluation anew, simulated; a table, a page with plots, a line of JSON."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.otas import load, page
from benchmarks.otas.cells import BURSTY, SYNTHETIC, Cell, Measured, Source, measure
from benchmarks.otas.evaluation import Evaluation, cells, judge
from trimtab.options import console
from trimtab_pipelines.documents import write_atomically

FACTORS = (0.75, 1.0, 1.25)


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds."""
    given = _parse()
    trace = given.trace or given.data / load.TRACE
    if not trace.exists():
        sys.stderr.write(f"{trace} is missing: bursts are made up; --data FOLDER names the trace's\n")
        trace = None
    source = Source(trace, given.trace_start, given.seconds)
    found = _simulated(source, cells(FACTORS, given.seeds, (SYNTHETIC, BURSTY)), given.processes)
    evaluation = Evaluation(found, "made up" if trace is None else f"{trace.name}, from second {given.trace_start}")
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "otas.html", page.render(evaluation))
    table = Table(*page.HEADS, box=None, pad_edge=False)
    for row in page.result_rows(evaluation):
        table.add_row(*row)
    console.print(table)
    console.print(f"page: {given.out / 'otas.html'}")
    outcome = judge(evaluation)
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


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


def _simulated(source: Source, wanted: Sequence[Cell], processes: int) -> list[Measured]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: list[Measured] = []
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with Progress(*columns, console=console) as bar_shown, pool:
        task = bar_shown.add_task("simulating", total=len(wanted))
        for one in pool.imap_unordered(partial(measure, source), wanted):
            found.append(one)
            bar_shown.update(task, advance=1, description=f"{one.cell.workload} {one.cell.method}")
    return found


if __name__ == "__main__":
    sys.exit(main())
