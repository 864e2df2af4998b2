"""`trimtab profile`: profiles the variants of a pipeline, on this machine or on the nodes of a cluster."""

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from trimtab.kubernetes_access import OnStatus, connected, namespaced_name, request_profiling
from trimtab.options import SAMPLES_METAVAR, NamespaceOption, PipelineArgument, console, terminal_table
from trimtab.preflight import prepare, profiling_progress, remarks
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline, pipeline_folder
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.result_line import ResultLine
from trimtab_profiler.bench_results import bench_profiles
from trimtab_profiler.profile import ROWS, ProfileOptions, fit_errors, profile, write_profiles
from trimtab_protocol import Tensor
from trimtab_protocol.tensors import Array


def command(
    pipeline: PipelineArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for profile.yaml; default: the pipeline's folder")
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option("--samples", metavar=SAMPLES_METAVAR, help="Samples to measure on; default: drawn inputs"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure containers at this address, such as http://HOST:8000")
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Instead, read a result of `vllm bench serve`, AIPerf, GuideLLM or AIConfigurator"
        ),
    ] = None,
    *,
    quick: Annotated[bool, typer.Option(help="Measure only what planning needs, in a few seconds")] = False,
    in_cluster: Annotated[
        bool, typer.Option(help="Measure by Jobs on the pipeline's nodes; PIPELINE may be a name")
    ] = False,
    namespace: NamespaceOption = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the cluster")] = 1800.0,
) -> int:
    """Measure latency and throughput of every variant, operating point, batch size and core allocation."""
    if in_cluster and (samples or engine):
        raise UserError("--samples and --engine cannot be combined with --in-cluster: they are of this machine")
    if in_cluster:
        return _in_cluster(*namespaced_name(pipeline, namespace), timeout)
    home = pipeline_folder(pipeline)
    if bench:
        return _write(bench_profiles(load_pipeline(pipeline), bench), out or home)
    document = prepare(pipeline, engine)
    options = ProfileOptions.quick(document) if quick else ProfileOptions.full()
    if samples is not None:
        options = replace(options, rows=sample_rows(LabelledPayloads(document, samples, labels="Optional")))
    for remark in remarks(pipeline, document):
        console.print(remark)
    with profiling_progress() as show:
        profiles = asyncio.run(profile(document, home, options, show))
    return _write(profiles, out or home)


def _write(profiles: Mapping[str, ModelProfile], folder: Path) -> int:
    path = write_profiles(profiles, folder)
    for measured in profiles.values():
        console.print(_table(measured))
    console.print(f"profiles written to {path}")
    ResultLine(name="profile", figures=_figures(profiles)).print()
    return 0


def sample_rows(samples: LabelledPayloads) -> dict[str, Array]:
    """Rows of the first samples by request input; if shapes differ, of those with the most frequent shapes."""
    by_shapes: dict[object, list[tuple[Tensor, ...]]] = {}
    for number in range(min(ROWS, len(samples))):
        tensors = samples.payload(number).inputs
        by_shapes.setdefault(tuple((tensor.name, tensor.shape) for tensor in tensors), []).append(tensors)
    rows = zip(*max(by_shapes.values(), key=len), strict=True)
    return {f"{REQUEST}.inputs.{of[0].name}": np.concatenate([tensor.array for tensor in of]) for of in rows}


def _in_cluster(namespace: str, name: str, timeout_seconds: float) -> int:
    with console.status(f"requesting profiles of {namespace}/{name}") as status:
        profiles = asyncio.run(_request(namespace, name, status.update, timeout_seconds))
    by_name = {profile.metadata.name: profile for profile in sorted(profiles, key=lambda p: p.metadata.name)}
    for measured in by_name.values():
        console.print(f"ModelProfile {measured.metadata.name}, measured on {measured.spec.hardware.processor}")
        console.print(_table(measured))
    ResultLine(name="profile-in-cluster", figures=_figures(by_name)).print()
    return 0


async def _request(namespace: str, name: str, on_status: OnStatus, timeout_seconds: float) -> list[ModelProfile]:
    async with connected() as cluster:
        return await request_profiling(cluster, namespace, name, on_status, timeout_seconds)


def _figures(profiles: Mapping[str, ModelProfile]) -> dict[str, float]:
    errors = [abs(error) for error in fit_errors(profiles)]
    return {
        "points": sum(len(profile.spec.points) for profile in profiles.values()),
        "fit_mean_relative_error": statistics.fmean(errors),
        "fit_worst_relative_error": max(errors),
    }


def _table(profile: ModelProfile) -> Table:
    spec = profile.spec
    slo = f"; stage SLO {1000 * spec.stage_slo_seconds:.1f} ms" if spec.stage_slo_seconds else ""
    drawn = "; on inputs drawn at random, --samples measures on yours" if spec.inputs == "Drawn" else ""
    columns = ("variant", "point", "cores", "batch 1 p50", "batch 1 p99", "max rows/s", "at batch", "fit error", "peak")
    rows = []
    for point in spec.points:
        first = point.measurements[0]
        best = max(point.measurements, key=lambda measured: measured.throughput_rps)
        latencies = [f"{1000 * s:.2f} ms" for s in (first.latency_seconds_p50, first.latency_seconds_p99)]
        fastest = (f"{best.throughput_rps:.0f}", str(best.batch_size), f"{100 * point.fit.mean_relative_error:.1f} %")
        memory = spec.memory.get(point.variant)
        peak = f"{max(memory.peak_bytes.values()) / 2**20:.0f} MiB" if memory is not None else ""
        rows.append((point.variant, point.operating_point, f"{point.cores:g}", *latencies, *fastest, peak))
    return terminal_table(columns, rows, f"{spec.stage}{slo}{drawn}")
