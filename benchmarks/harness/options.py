"""Options that evaluations share, and the trace that their load follows."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from trimtab_predictor.trace import TraceError


def paper_parser(name: str, description: str | None, trace_help: str) -> argparse.ArgumentParser:
    """Return the parser of a paper's evaluation, with the options that all papers have."""
    parser = argparse.ArgumentParser(prog=f"benchmarks reproduce-{name}", description=description)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of traces and profiles")
    parser.add_argument("--trace", type=Path, help=trace_help)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out") / name)
    return parser


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """The trace that a load follows; without a file the load is synthetic."""

    file: Path | None
    start_seconds: int = 0

    @property
    def label(self) -> str:
        return "made up" if self.file is None else f"{self.file.name}, from second {self.start_seconds}"


def find_trace(named: Path | None, own: Path, otherwise: str) -> Path | None:
    """Return the trace that the user named, else our own; None if our own is missing, which is reported.

    Raises TraceError if the named trace is missing: its name may be mistyped, and another load would pass for it.
    """
    if named is not None and not named.exists():
        raise TraceError(f"{named}: no such trace file")
    if named is not None or own.exists():
        return named or own
    sys.stderr.write(f"{own} is missing: {otherwise}; --data FOLDER names its folder\n")
    return None


def load_trace(options: argparse.Namespace, own_name: str, own_start_seconds: int, otherwise: str) -> LoadTrace:
    """Return the trace of `--trace` and `--trace-start`.

    Our own trace begins at a known second by default, another one at its first.
    """
    file = find_trace(options.trace, options.data / own_name, otherwise)
    default_start = own_start_seconds if options.trace is None else 0
    return LoadTrace(file, default_start if options.trace_start is None else options.trace_start)
