"""Evaluation of simulated cells: a trace, processes, a table, a page, a verdict."""

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import plotly.graph_objects as go
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trimtab.options import console
from trimtab.report.html_page import OWN_X_AXIS
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.result_line import ResultLine
from trimtab_predictor.trace import TraceError

GRID = "rgba(134,141,152,0.25)"

Cell = TypeVar("Cell")
Found = TypeVar("Found")


def trace_of(named: Path | None, own: Path, instead: str) -> Path | None:
    """The trace that is named, else our own; where that is not there None, and `instead` is told.

    Raises:
        TraceError: the named one is not there: its name may be mistyped, and another load would pass for it.
    """
    if named is not None and not named.exists():
        raise TraceError(f"{named}: no such trace file")
    if named is not None or own.exists():
        return named or own
    sys.stderr.write(f"{own} is missing: {instead}; --data FOLDER names the trace's\n")
    return None


def start_of(given_seconds: int | None, named: Path | None, own_seconds: int) -> int:
    """The second to begin at where none is given: a known stretch of our own trace, the first second of another."""
    if given_seconds is not None:
        return given_seconds
    return own_seconds if named is None else 0


def progress() -> Progress:
    """The bar that evaluations show: what was done last, how much of all, and how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def simulated(
    measure: Callable[[Cell], Found], cells: Sequence[Cell], processes: int, told: Callable[[Found], str]
) -> list[Found]:
    """Measure all cells, in the order in which they end; `told` names the last one beside the bar."""
    found: list[Found] = []
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with progress() as shown, pool:
        task = shown.add_task("simulating", total=len(cells))
        for one in pool.imap_unordered(measure, cells):
            found.append(one)
            shown.update(task, advance=1, description=told(one))
    return found


def concluded(page: Path, html: str, heads: Sequence[str], rows: Iterable[Sequence[str]], outcome: ResultLine) -> int:
    """Write the page, show table and verdict, print the outcome; 0 where every bar holds."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, html)
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"page: {page}")
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


def laid_out(figure: go.Figure, *, below: int = 80) -> go.Figure:
    """A figure as all of them look, its legend above; `below`: pixels for what stands under it."""
    figure.update_layout(
        height=420,
        meta=OWN_X_AXIS,
        margin={"l": 64, "r": 24, "t": 110, "b": below},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#868d98"},
        legend={"orientation": "h", "x": 0, "y": 1.14, "yanchor": "bottom"},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
    return figure
