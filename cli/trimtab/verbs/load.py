"""`trimtab load`: push a pipeline that runs already, and account for every request."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.local.loading import LoadOrder
from trimtab.options import (
    DurationOption,
    LoadOption,
    PipelineArgument,
    ScaleOption,
    SeedOption,
    SpeedUpOption,
    TraceOption,
    console,
    load_order,
)
from trimtab_loadtester.attack import attack
from trimtab_loadtester.load import LoadError
from trimtab_loadtester.progress import progress_bar
from trimtab_loadtester.wire import Access
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.ends import End
from trimtab_pipelines.outcome import Outcome, bar


def command(  # noqa: PLR0913, PLR0917  (one for each option)
    pipeline: PipelineArgument,
    load: LoadOption = None,
    trace: TraceOption = None,
    speed_up: SpeedUpOption = 1.0,
    scale: ScaleOption = 1.0,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    address: Annotated[str, typer.Option(help="host:port of the router")] = "127.0.0.1:8080",
    wire: Annotated[Literal["REST", "gRPC"], typer.Option(help="Protocol; give the matching port")] = "REST",
    ca: Annotated[Path | None, typer.Option(help="Use TLS; the authority that signed the door's certificate")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the door asks for")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for requests.npz and load.json")] = None,
) -> int:
    """Send a load to a pipeline that runs already: open loop, real inputs, every request accounted for."""
    document = load_pipeline(pipeline)
    order = load_order(load, trace, speed_up, scale, duration, seed)
    if order is None:
        raise LoadError("say what to send: --load constant:20 --duration 60, or --trace FILE")
    order = LoadOrder(load, trace, speed_up, scale, duration, seed, wire, Access(ca, api_key_file))
    with progress_bar(console) as show:
        results = attack(document, address, order.spec(), order.options, show)
    summary = results.summary()
    if out is not None:
        results.save(out)
    figures = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    ends = sum(summary[end.word] for end in End)
    Outcome(
        name="load", figures=figures, bars=(bar("requests without an outcome", summary["received"] - ends, "==", 0),)
    ).print()
    return 0
