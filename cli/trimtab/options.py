"""Options that several commands share."""

import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab_pipelines.errors import UserError

PipelineArgument = Annotated[Path, typer.Argument(metavar="PIPELINE", help="Path of pipeline.yaml, or of its folder")]
SAMPLES_METAVAR = "DIR|module:Class"
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--samples",
        metavar=SAMPLES_METAVAR,
        help="Labelled samples to send; default: the payloads that the pipeline names",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Random seed of arrivals and payloads")]
MaxSamplesOption = Annotated[int | None, typer.Option("--max", min=1, help="Maximum number of samples")]
EditedPipelineOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Path of the changed pipeline.yaml; default: the file read")
]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Path of the HTML report")]
ProfilesOption = Annotated[
    Path | None,
    typer.Option("--profiles", help="Profile file; default: the one next to the pipeline, else measured now"),
]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Kubernetes namespace; default: the pipeline's own, else `default`")
]
PagePortOption = Annotated[
    int, typer.Option(min=-1, max=65535, help="Port of the live page; 0: a free port, -1: no live page")
]
LIVE_PAGE_PORT = 8083
OutFolderOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder of the report and the run's record; default: in the user's cache folder"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON to stdout, all else to stderr")]

LOG_WIDTH = 150
console = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else LOG_WIDTH)


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """Options that define a load."""

    load: Annotated[
        str | None,
        typer.Option(
            "--load",
            help="Requests per second: 20, constant:20, step:5,40@60, steps:5x30,20x30, generated:low=4,high=40,seed=1 "
            "or, for chats, multimodal:rps=5,seed=1",
        ),
    ] = None
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Trace file: requests of each second, as .csv or .csv.gz")
    ] = None
    speed_up: Annotated[
        float, typer.Option("--speed-up", help="Shorten the trace by this factor, at the same rates")
    ] = 1.0
    scale: Annotated[float, typer.Option("--scale", help="Multiply the trace's rates by this factor")] = 1.0
    duration_seconds: Annotated[
        float | None, typer.Option("--duration", help="Seconds; default: the load's own length")
    ] = None
    seed: SeedOption = 0


@dataclass(frozen=True, slots=True)
class SampledLoadArguments(LoadArguments):
    """Options that define a load and its payloads."""

    samples: SamplesOption = None


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """Options that define what to plan with."""

    profiles: ProfilesOption = None
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Also plan for other values: load=40/80,slo=200ms,budget=x1.5 (/ separates values, x multiplies); "
            "repeatable",
        ),
    ] = None
    in_cluster: Annotated[
        bool,
        typer.Option(
            "--in-cluster", help="Read pipeline, profiles and current plan from the cluster; PIPELINE may be a name"
        ),
    ] = False
    namespace: NamespaceOption = None
    as_json: JsonOption = False


def terminal_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    table = Table(*columns, box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text is not markup, in which [name] of an extra is a tag
    return table


def parse_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT; raises UserError."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"--address {address!r} must be HOST:PORT, such as 127.0.0.1:8082")
    return host, int(port)


def signal_exit_code(number: signal.Signals) -> int:
    """Exit code of a command that a signal ended, as shells report it."""
    return 128 + number


@contextmanager
def console_to_stderr(enabled: bool) -> Iterator[None]:  # noqa: FBT001  (the value of --json)
    """Print to stderr what is meant for people, while stdout is reserved for JSON."""
    before, console.stderr = console.stderr, enabled or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def print_json_line(value: object) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
