"""`trimtab report`: make the page of a recorded run again."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.options import console
from trimtab.record import load
from trimtab.report.page import write_report
from trimtab.report.summary import print_comparison, print_summary


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Recorded runs; the first is the main one")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write")] = Path("report.html"),
) -> int:
    """Make the HTML report of one recorded run, or of several compared."""
    runs = [load(folder) for folder in folders]
    print_summary(runs[0], console)
    if len(runs) > 1:
        print_comparison(runs, console)
    write_report(out, runs)
    console.print(f"report: {out}")
    return 0
