"""`python -m benchmarks.ipa`: IPA's tables anew, in the simulator; a table, a page with plots, one line of JSON."""

import argparse
import csv
import math
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.evaluating import trace_of
from benchmarks.ipa import data, page, sweeps, verdict
from benchmarks.ipa.cells import (
    METHODS,
    ORACLE,
    OURS,
    RANKS,
    REACTIVE,
    Cell,
    Measured,
    Source,
    measure,
    pipeline_of,
    workloads_of,
)
from benchmarks.ipa.evaluation import Evaluation
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_profiler.profile import write_profiles

SEEDS, QUICK_SECONDS, QUICK_WORKLOADS = 3, 240, ("bursty", "steady_low")
SOLVED_INSTANCES = 15
ORACLE_MOST, LSTM_MOST = 0.005, 0.01


def main() -> int:
    """Simulate every cell, write what came of it, judge it.

    Returns:
        0 where every bar holds, or where there is no data; 2 for a trace that is named and cannot be.
    """
    return run_reporting_errors(partial(_evaluate, _parse()))


def _evaluate(given: argparse.Namespace) -> int:
    trace = trace_of(given.trace, given.data / data.TRACE, "nothing can be simulated") or given.data / data.TRACE
    missing = data.missing_files(given.data, trace)
    if missing:
        return _skip(f"{missing[0]} is missing; give --data FOLDER (DATA=FOLDER with make) and perhaps --trace FILE")
    source = Source(
        folder=given.data,
        manifests=given.pipelines,
        trace=trace,
        offset_seconds=given.trace_start,
        published=given.published_excerpts,
        seconds=QUICK_SECONDS if given.quick else None,
    )
    names = given.only or list(data.PIPELINES)
    if given.profiles_only:
        for name in names:
            console.print(f"written: {write_profiles(pipeline_of(source, name)[1], given.out / name)}")
        return 0
    workloads_of(source)  # a trace that cannot be cut is told before hours of others are simulated
    began = time.perf_counter()
    measured = _simulated(source, _cells(source, names, given), given.processes)
    solved = sweeps.solver_seconds(SOLVED_INSTANCES)
    evaluation = Evaluation(
        measured=[one for one in measured if one.cell.accuracy_weight is None],
        swept=[one for one in measured if one.cell.accuracy_weight is not None],
        solver_seconds=solved,
        recorded=data.recorded(given.data),
        seeds=given.seeds,
        excerpts="the paper's own" if given.published_excerpts else "look-alikes from the training part",
    )
    _write(given.out, evaluation)
    outcome = judge(evaluation, time.perf_counter() - began)
    outcome.print()
    return 0 if outcome.holds else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ipa", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of traces and profiles")
    parser.add_argument("--pipelines", type=Path, default=Path("pipelines"), help="folder of the manifests")
    parser.add_argument("--trace", type=Path, help="another trace of requests per second")
    parser.add_argument("--trace-start", type=int, default=0, help="the recording's second at which the trace begins")
    parser.add_argument("--published-excerpts", action="store_true", help="the paper's own seconds of the recording")
    parser.add_argument("--only", action="append", choices=data.PIPELINES, help="this pipeline; may be repeated")
    parser.add_argument("--profiles-only", action="store_true", help="only write OUT/PIPELINE/profile.yaml, and end")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="two workloads, four minutes each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/ipa"))
    return parser.parse_args()


def _skip(why: str) -> int:
    sys.stderr.write(f"skipped: {why}\n")
    ResultLine(name="reproduce-ipa", figures={"skipped": why}).print()
    return 0


def _cells(source: Source, names: Sequence[str], given: argparse.Namespace) -> list[Cell]:
    workloads = QUICK_WORKLOADS if given.quick else tuple(data.EXCERPTS)
    grid = [
        Cell(pipeline, workload, method, seed)
        for pipeline in names
        for workload in workloads
        for method in METHODS
        for seed in range(1, given.seeds + 1)
    ]
    weights = {name: pipeline_of(source, name)[0].spec.objective.accuracy_weight for name in names}
    return grid + sweeps.sweep_cells(names, weights, seed=1)


def _simulated(source: Source, cells: Sequence[Cell], processes: int) -> list[Measured]:
    """Simulate all cells, as many at once as there are processes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: list[Measured] = []
    with Progress(*columns, console=console) as bar_shown, _pool(processes) as pool:
        task = bar_shown.add_task("simulating", total=len(cells))
        for one in pool.imap_unordered(partial(measure, source), cells):
            found.append(one)
            bar_shown.update(task, advance=1, description=f"{one.cell.pipeline} {one.cell.workload}")
            if not console.is_terminal and len(found) % 50 == 0:
                console.print(f"{len(found)} of {len(cells)} simulated")
    return found


def _pool(processes: int) -> "multiprocessing.pool.Pool":
    return multiprocessing.get_context("spawn").Pool(processes)


def _write(folder: Path, evaluation: Evaluation) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    heads, rows = page.result_rows(evaluation)
    write_atomically(folder / "results.csv", _csv(heads, rows))
    write_atomically(folder / "ipa.html", page.render(evaluation))
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"table: {folder / 'results.csv'}\npage: {folder / 'ipa.html'}")


def _csv(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = _Lines()
    csv.writer(lines, lineterminator="\n").writerows([heads, *rows])
    return "".join(lines.written)


@dataclass(slots=True)
class _Lines:
    written: list[str]

    def __init__(self) -> None:
        self.written = []

    def write(self, line: str) -> int:
        self.written.append(line)
        return len(line)


def judge(evaluation: Evaluation, seconds: float) -> ResultLine:
    """Judge by two bars: nowhere below the front, and few violations wherever they can be avoided.

    Where there is nothing to judge, or an oracle or a plan that met no requests, they do not hold.
    """
    results = evaluation.results
    pairs = sorted({(pipeline, workload) for pipeline, workload, _ in results})
    places = {pair: verdict.place(results, *pair) for pair in pairs}
    figures: dict[str, float | int | str | None] = {"cells": len(evaluation.measured), "wall_seconds": seconds}
    avoidable: list[float] = []
    reactive = 0.0
    for pair, found in places.items():
        name = "_".join(pair).replace("-", "_")
        ours = verdict.interval(one.violations for one in results[(*pair, OURS)]).mean
        oracle = verdict.interval(one.violations for one in results[(*pair, ORACLE)]).mean
        reactive = max(reactive, verdict.interval(one.violations for one in results[(*pair, REACTIVE)]).mean)
        if not oracle > ORACLE_MOST:
            avoidable.append(ours)
        figures |= {
            f"{name}_standing": found.standing + (f" {found.beaten_by}" if found.beaten_by else ""),
            f"{name}_margin": found.margin,
            f"{name}_violations": ours,
        }
    figures["worst_violations_reactive"] = reactive
    ranked = [verdict.place(results, *pair, RANKS) for pair in pairs]
    figures["pairs_below_optimising_ranks"] = sum(found.standing == "below" for found in ranked)
    figures |= {f"solver_p50_seconds_{s}x{v}": median for (s, v), (median, _) in evaluation.solver_seconds.items()}
    below = sum(found.standing == "below" for found in places.values())
    worst = float(np.max(avoidable)) if avoidable else math.inf  # NaN where one is
    bars = (
        threshold("pipeline x workload pairs judged", len(pairs), ">=", 1),
        threshold("pairs where an oracle avoids violations", len(avoidable), ">=", 1),
        threshold("pipeline x workload pairs below the baselines' front", below, "==", 0),
        threshold("worst violations with the LSTM where the oracle has at most 0.5 %", worst, "<=", LSTM_MOST),
    )
    return ResultLine(name="reproduce-ipa", figures=figures, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
