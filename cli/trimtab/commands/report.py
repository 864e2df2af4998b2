"""`trimtab report`: writes the HTML report of a recorded run."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.options import JsonOption, console, console_to_stderr, print_json_line
from trimtab.report.page import write_report
from trimtab.report.summary import print_comparison, print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_record import load


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Recorded runs; the first is the main one")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Path of the HTML report; default: report.html in the first folder"),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> int:
    """Write the HTML report of one recorded run, or of several compared."""
    out = out or folders[0] / "report.html"
    runs = [load(folder) for folder in folders]
    with console_to_stderr(as_json):
        print_summary(runs[0], console)
        if len(runs) > 1:
            print_comparison(runs, console)
        write_report(out, runs)
    if as_json:
        print_json_line([{"title": run.title, **stats_json(run_stats(run))} for run in runs])
    return 0


def stats_json(stats: RunStats) -> dict[str, Any]:
    """Return statistics as JSON values; NaN becomes None."""
    values = asdict(stats)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
