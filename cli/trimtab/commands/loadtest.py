"""`trimtab loadtest`: sends a load to a running pipeline and accounts for every request."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trimtab.load_options import parse_load_options
from trimtab.options import PipelineArgument, SampledLoadArguments, console, parse_address, signal_exit_code
from trimtab_loadtester.attack import ClientProtocol, OnProgress, Progress, attack
from trimtab_loadtester.clients import Access
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.result_line import ResultLine, threshold


def command(
    pipeline: PipelineArgument,
    load: SampledLoadArguments,
    address: Annotated[str, typer.Option(help="HOST:PORT of the pipeline")] = "127.0.0.1:8080",
    protocol: Annotated[
        ClientProtocol, typer.Option(help="Protocol of the port; chat: OpenAI chat completions, streamed")
    ] = "REST",
    ca: Annotated[Path | None, typer.Option(help="CA certificate of the server; enables TLS")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the API key to send")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for requests.npz and load.json")] = None,
    least_within_slo: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Exit with 1 if a smaller fraction meets the SLO")
    ] = 0.0,
) -> int:
    """Send an open-loop load of real inputs to a running pipeline and account for every request.

    Exits with 1 if a request failed, none succeeded, or too few met the SLO.
    """
    if ":" in str(pipeline) and not pipeline.exists():
        raise LoadError(f"{pipeline}: PIPELINE is a file or folder; give the running pipeline by --address HOST:PORT")
    document = load_pipeline(pipeline)
    options = parse_load_options(load, samples=load.samples)
    if options is None:
        raise LoadError("no load: give --load constant:20 --duration 60, or --trace FILE")
    parse_address(address.removeprefix("grpc://"))
    options = replace(options, protocol=protocol, access=Access(ca, api_key_file))
    signals: list[signal.Signals] = []
    with _progress_bar() as on_progress:
        results = attack(document, address, options.spec(), options.attack_options, on_progress, signals.append)
    if out is not None:
        results.save(out)
    for reason, count in results.failures().items():
        console.print(f"! {count} requests failed: {reason}")
    for stage in results.idle_stages():
        console.print(f"! stage {stage} served no rows; send --samples that reach it")
    result = loadtest_result(results.summary(), least_within_slo)
    result.print()
    if results.facts.interrupted:
        return signal_exit_code(signals[0])
    return 0 if result.holds else 1


def loadtest_result(summary: Mapping[str, Any], least_within_slo: float) -> ResultLine:
    figures = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    accounted = sum(summary[outcome.word] for outcome in RequestOutcome)
    bars = (
        threshold("requests without an outcome", summary["received"] - accounted, "==", 0),
        threshold("failed requests", summary["failed"], "==", 0),
        threshold("answered requests", summary["ok"] + summary["late"], ">=", 1),
        threshold("fraction within the SLO", summary["slo_fraction"] or 0.0, ">=", least_within_slo),
    )
    return ResultLine(name="loadtest", figures=figures, bars=bars)


def _describe(progress: Progress) -> str:
    """Format the counts of sent requests and of each outcome that occurred as one line."""
    parts = [
        f"{count} {outcome.word}"
        for outcome, count in progress.outcomes.items()
        if count or outcome is RequestOutcome.OK
    ]
    waiting = progress.sent - sum(progress.outcomes.values())
    return f"{progress.sent}/{progress.scheduled} sent · {' · '.join(parts)} · {waiting} waiting"


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    """Show a bar while the block runs; yield the `on_progress` callback of `attack`."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("waiting for the first request", total=None)

        def show(progress: Progress) -> None:
            done = min(progress.elapsed_seconds, progress.duration_seconds)
            bar.update(task, total=progress.duration_seconds, completed=done, description=_describe(progress))

        yield show
