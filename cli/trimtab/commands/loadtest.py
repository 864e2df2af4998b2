"""`trimtab loadtest`: push a pipeline that runs already, and account for every request."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.exit_codes import exit_code
from trimtab.load_options import parse_load_options
from trimtab.options import (
    DurationOption,
    LoadOption,
    PipelineArgument,
    SamplesOption,
    ScaleOption,
    SeedOption,
    SpeedUpOption,
    TraceOption,
    console,
    parse_address,
)
from trimtab_loadtester.attack import WireName, attack
from trimtab_loadtester.clients import Access
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.progress import progress_bar
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine, threshold


def command(
    pipeline: PipelineArgument,
    load: LoadOption = None,
    trace: TraceOption = None,
    speed_up: SpeedUpOption = 1.0,
    scale: ScaleOption = 1.0,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
    address: Annotated[str, typer.Option(help="host:port of the router")] = "127.0.0.1:8080",
    wire: Annotated[
        WireName, typer.Option(help="Protocol; give the matching port. chat: as OpenAI's clients, streamed")
    ] = "REST",
    ca: Annotated[Path | None, typer.Option(help="Use TLS; the authority that signed the door's certificate")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the door asks for")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for requests.npz and load.json")] = None,
    least_within_slo: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Exit with 1 where a smaller share is answered within the SLO")
    ] = 0.0,
) -> int:
    """Send a load to a pipeline that runs already: open loop, real inputs, every request accounted for.

    Exits with 1 where a request failed, none was answered, or too few within the SLO.
    """
    if ":" in str(pipeline) and not pipeline.exists():
        raise LoadError(f"{pipeline}: give the folder of the pipeline here, and where it runs by --address HOST:PORT")
    document = load_pipeline(pipeline)
    order = parse_load_options(load, trace, speed_up, scale, duration, seed, samples=samples)
    if order is None:
        raise LoadError("say what to send: --load constant:20 --duration 60, or --trace FILE")
    parse_address(address.removeprefix("grpc://"))
    order = replace(order, wire=wire, access=Access(ca, api_key_file))
    came: list[signal.Signals] = []
    with progress_bar(console) as show:
        results = attack(document, address, order.spec(), order.options, show, came.append)
    summary = results.summary()
    if out is not None:
        results.save(out)
    outcome = loadtest_result(summary, least_within_slo)
    outcome.print()
    if results.facts.interrupted:
        return exit_code(came[0])
    return 0 if outcome.holds else 1


def loadtest_result(summary: Mapping[str, Any], least_within_slo: float) -> ResultLine:
    """Judge a load by its summary."""
    figures = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    ends = sum(summary[end.word] for end in RequestOutcome)
    bars = (
        threshold("requests without an outcome", summary["received"] - ends, "==", 0),
        threshold("failed requests", summary["failed"], "==", 0),
        threshold("answered requests", summary["ok"] + summary["late"], ">=", 1),
        threshold("fraction within the SLO", summary["slo_fraction"] or 0.0, ">=", least_within_slo),
    )
    return ResultLine(name="load", figures=figures, bars=bars)
