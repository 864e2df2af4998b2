"""Options several verbs share, in the same words everywhere."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trimtab_pipelines.errors import UserError

PipelineArgument = Annotated[Path, typer.Argument(metavar="PIPELINE", help="pipeline.yaml, or the folder it is in")]
TraceOption = Annotated[Path | None, typer.Option("--trace", help="Load: requests of each second, a .csv or .csv.gz")]
LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        help="Load: 20 (a second; constant:20 too), step:5,40@60, steps:5x30,20x30, generated:low=4,high=40,seed=1 "
        "or, of chats, multimodal:rps=5,seed=1",
    ),
]
SpeedUpOption = Annotated[float, typer.Option("--speed-up", help="Play the trace this many times faster, same rates")]
ScaleOption = Annotated[float, typer.Option("--scale", help="Multiply the trace's rates")]
DurationOption = Annotated[float | None, typer.Option("--duration", help="Seconds; default: the load's own length")]
SamplesOption = Annotated[
    str | None,
    typer.Option(
        "--samples",
        metavar="DIR|module:Class",
        help="Send your own samples, with their right answers; default: what the pipeline names",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of arrivals and payloads")]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write an HTML report of the run")]
ProfilesOption = Annotated[
    Path | None,
    typer.Option("--profiles", help="Profile to plan with; default: beside the pipeline, else measured here"),
]
InClusterOption = Annotated[
    bool,
    typer.Option(
        "--in-cluster", help="Take pipeline, profiles and what runs now from the cluster; PIPELINE may be a name"
    ),
]
NamespaceOption = Annotated[str | None, typer.Option(help="In the cluster; default: as it says itself, or default")]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        help="Try others beside it: load=40/80,slo=200ms,budget=x1.5 (/ between values, x multiplies); repeat",
    ),
]
PagePortOption = Annotated[
    int, typer.Option(min=-1, max=65535, help="Port of the live page; 0 takes a free one, -1 serves none")
]
LIVE_PAGE_PORT = 8083
OutFolderOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for report and record; default: reports in the user's cache folder"),
]
EdgeOption = Annotated[
    str | None,
    typer.Option(
        "--edge", metavar="FILE|none", help="Settings of the door (TLS, keys, limits); none: plain REST without Envoy"
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead; all else goes to stderr")]

LOG_WIDTH = 150
console = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else LOG_WIDTH)


def parse_address(address: str) -> tuple[str, int]:
    """Read HOST:PORT; raises UsersMistake where it is none."""
    host, _, number = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not number.isdecimal() or not 1 <= int(number) <= 65535:
        raise UserError(f"--address {address!r} must be HOST:PORT, such as 127.0.0.1:8082")
    return host, int(number)


@contextmanager
def aside(asked: bool) -> Iterator[None]:  # noqa: FBT001  (an option as typer read it)
    """Write to standard error what is meant for people, where standard output is to be JSON."""
    before, console.stderr = console.stderr, asked or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def write_json_line(facts: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
