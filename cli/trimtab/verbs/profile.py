"""`trimtab profile`: measure every variant of a pipeline on this machine."""

import asyncio
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from trimtab.options import PipelineArgument, console
from trimtab.preparation import measuring, prepare
from trimtab_pipelines.outcome import Outcome
from trimtab_pipelines.profile import ModelProfile
from trimtab_profiler.profile import ProfileOptions, fit_errors, profile, write_profiles


def command(
    pipeline: PipelineArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for profile.yaml; default: beside the pipeline")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option(help="A few seconds: only what planning needs")] = False,
) -> int:
    """Measure latency and throughput of every variant, operating point, batch size and allocation of cores."""
    document = prepare(pipeline)
    home = pipeline.resolve() if pipeline.is_dir() else pipeline.resolve().parent
    options = ProfileOptions.quick(document) if quick else ProfileOptions.full()
    with measuring(console) as show:
        profiles = asyncio.run(profile(document, home, options, show))
    path = write_profiles(profiles, out or home)
    for found in profiles.values():
        console.print(_table(found))
    errors = [abs(error.relative_error) for error in fit_errors(profiles)]
    console.print(f"written to {path}")
    figures = {
        "points": sum(len(found.spec.points) for found in profiles.values()),
        "fit_mean_relative_error": statistics.fmean(errors),
        "fit_worst_relative_error": max(errors),
    }
    Outcome(name="profile", figures=figures).print()
    return 0


def _table(profile: ModelProfile) -> Table:
    spec = profile.spec
    slo = f"; stage SLO {1000 * spec.stage_slo_seconds:.1f} ms" if spec.stage_slo_seconds else ""
    columns = ("variant", "point", "cores", "batch 1 p50", "batch 1 p99", "best rows/s", "at batch", "fit error")
    table = Table(*columns, title=f"{spec.stage}{slo}", title_justify="left", box=None, pad_edge=False)
    for point in spec.points:
        first = point.measurements[0]
        best = max(point.measurements, key=lambda measured: measured.throughput_rps)
        table.add_row(
            point.variant,
            point.operating_point,
            f"{point.cores:g}",
            f"{1000 * first.latency_seconds_p50:.2f} ms",
            f"{1000 * first.latency_seconds_p99:.2f} ms",
            f"{best.throughput_rps:.0f}",
            str(best.batch_size),
            f"{100 * point.fit.mean_relative_error:.1f} %",
        )
    return table
