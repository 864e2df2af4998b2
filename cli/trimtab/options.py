"""Options several verbs share, in the same words everywhere."""

import sys
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from rich.console import Console

from trimtab.local.loading import LoadOrder
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_loadtester.load import LoadError
from trimtab_pipelines.documents import load_edge
from trimtab_pipelines.spec import InferencePipeline

PipelineArgument = Annotated[Path, typer.Argument(metavar="PIPELINE", help="pipeline.yaml, or the folder it is in")]
TraceOption = Annotated[Path | None, typer.Option("--trace", help="Load: requests of each second, a .csv or .csv.gz")]
LoadOption = Annotated[
    str | None,
    typer.Option("--load", help="Load: constant:20, step:5,40@60, steps:5x30,20x30 or generated:low=4,high=40,seed=1"),
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
EdgeOption = Annotated[
    str | None,
    typer.Option(
        "--edge", metavar="FILE|none", help="Settings of the door (TLS, keys, limits); none: plain REST without Envoy"
    ),
]

LOG_WIDTH = 150
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else LOG_WIDTH)


class Door(TypedDict):
    """Of a Setup, the fields that say what stands before the router."""

    door: bool
    edge: Path | None


def door(edge: str | None) -> Door:
    """Read --edge; raises DocumentError before anything starts."""
    if edge == "none":
        return {"door": False, "edge": None}
    load_edge(Path(edge) if edge else None)
    return {"door": True, "edge": Path(edge) if edge else None}


def check_load(order: LoadOrder | None, edge: Path | None) -> None:
    """Raise LoadError where a load is asked for that the door would turn away."""
    settings = load_edge(edge)
    if order is not None and (settings.tls is not None or settings.authenticates):
        raise LoadError(
            f"--load: the door of {edge} asks for TLS or keys, which this load does not bring; start without --load, "
            "then send it with `trimtab load`, --ca and --api-key-file"
        )


def place_of(address: str) -> tuple[str, int]:
    """Read HOST:PORT; raises LoadError where it is none."""
    host, _, number = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not number.isdecimal() or not 1 <= int(number) <= 65535:
        raise LoadError(f"--address {address!r} must be HOST:PORT, such as 127.0.0.1:8082")
    return host, int(number)


def check_samples(pipeline: InferencePipeline, samples: str | None) -> None:
    """Raise SamplesError where samples cannot be used, before anything starts."""
    if samples is not None:
        LabelledPayloads(pipeline, samples).payload(0)


def located(samples: str | None) -> str | None:
    """Return samples in a folder or file by their whole path: who sends them may run elsewhere."""
    return str(Path(samples).resolve()) if samples is not None and Path(samples).exists() else samples


def load_order(
    load: str | None,
    trace: Path | None,
    speed_up: float,
    scale: float,
    duration_seconds: float | None,
    seed: int,
    *,
    samples: str | None = None,
) -> LoadOrder | None:
    """Read the load options; None where none is asked for. Raises LoadError or TraceError before anything starts."""
    if load is not None and trace is not None:
        raise LoadError("give --load or --trace, not both")
    if load is None and trace is None:
        if samples is not None:
            raise LoadError("--samples says what to send: give --load or --trace too")
        return None
    order = LoadOrder(load, trace, speed_up, scale, duration_seconds, seed, samples=located(samples))
    order.spec().rates(duration_seconds)
    return order
