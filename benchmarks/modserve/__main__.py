"""`python -m benchmarks.modserve`: ModServe's evaluation anew, simulated; a table, a page, a line of JSON."""

import argparse
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.modserve import load, page
from benchmarks.modserve.cells import Evaluation, cells, judge, measure
from trimtab.options import console
from trimtab_pipelines.documents import write_atomically


def main() -> int:
    """Simulate every cell, write what came of it, judge it; 0 where every bar holds."""
    given = _parse()
    trace = given.trace or given.data / load.TRACE
    if not trace.exists():
        sys.stderr.write(f"{trace} is missing: minutes are made up; --data FOLDER names the trace's\n")
        trace = None
    evaluation = _simulated(given.seed, trace, given.processes)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "modserve.html", page.render(evaluation))
    table = Table(*page.HEADS, box=None, pad_edge=False)
    for row in page.result_rows(evaluation):
        table.add_row(*row)
    console.print(table)
    console.print(f"page: {given.out / 'modserve.html'}")
    outcome = judge(evaluation)
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.modserve", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the paper's trace")
    parser.add_argument("--trace", type=Path, help="another trace: requests of each minute, last of its columns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/modserve"))
    return parser.parse_args()


def _simulated(seed: int, trace: Path | None, processes: int) -> Evaluation:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    wanted = cells()
    found = {}
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with Progress(*columns, console=console) as bar_shown, pool:
        task = bar_shown.add_task("simulating", total=len(wanted))
        for cell, value in pool.imap_unordered(partial(measure, seed, trace), wanted):
            found[cell] = value
            bar_shown.update(task, advance=1, description=f"{cell.runs.name}, {cell.kind}")
    return Evaluation(found, "made up" if trace is None else trace.name)


if __name__ == "__main__":
    sys.exit(main())
