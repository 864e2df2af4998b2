"""IPA's figures, read from files: workload excerpts, profiles, baselines' settings and recorded runs."""

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.profile import Hardware, Measurement, ModelProfile, ModelProfileSpec, PointProfile
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.trace import Trace, TraceError, read_trace
from trimtab_profiler.fit import fit_latency

TRACE, PROFILES = "twitter_rps_train.csv.gz", "ipa_profiles.csv"
STAGES, TIMELINES = "ipa_pipelines.csv", "ipa_timelines.csv.gz"
DAMPING = 8
BATCHES = 100
EXCERPTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "bursty": ((869160, 870360),),
    "steady_low": ((694200, 695400),),
    "steady_high": ((416040, 416640), (416040, 416640)),
    "fluctuating": ((869400, 870000), (882000, 882600)),
}
"""Look-alikes of the paper's excerpts in the training part, by the paper's own rules (seconds of the trace)."""
PUBLISHED_EXCERPTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "bursty": ((1301160, 1302360),),
    "steady_low": ((1299600, 1300800),),
    "steady_high": ((1768800, 1769400), (1768800, 1769400)),
    "fluctuating": ((1301400, 1302000), (1308600, 1309200)),
}
"""The paper's own, in the held-out part; for a trace file that has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests per second, [S], and those of the seconds before, [H]."""

    rates_rps: NDArray[np.float64]
    history_rps: tuple[int, ...]


def read_workloads(
    trace_file: Path, offset_seconds: int, *, published: bool, max_seconds: int | None
) -> dict[str, Workload]:
    """Cut the excerpts out of a trace whose second 0 is the recording's second `offset_seconds`.

    Raises TraceError if the trace cannot be read, or lacks some of them.
    """
    trace = read_trace(trace_file).divided(DAMPING, whole=True)
    excerpts = PUBLISHED_EXCERPTS if published else EXCERPTS
    try:
        return {name: _workload(trace, parts, offset_seconds, max_seconds) for name, parts in excerpts.items()}
    except TraceError as error:
        hint = "the excerpts are seconds of the recording; --trace-start says at which of them the trace begins"
        raise TraceError(f"{error}; {hint}") from error


def _workload(
    trace: Trace, parts: tuple[tuple[int, int], ...], offset_seconds: int, max_seconds: int | None
) -> Workload:
    rates = np.concatenate([trace.excerpt(start - offset_seconds, end - offset_seconds).rps for start, end in parts])
    first = parts[0][0] - offset_seconds
    before = trace.rps[max(first - MEMORY_SECONDS, 0) : first]
    missing = np.flatnonzero(np.isnan(before))
    if missing.size:  # a service that counted nothing in a gap would have seen jumps
        before = before[missing[-1] + 1 :]
    return Workload(np.nan_to_num(rates)[:max_seconds], tuple(int(count) for count in before))


def read_profiles(folder: Path, pipeline: InferencePipeline) -> dict[str, ModelProfile]:
    """Read a pipeline's profiles: the complete grid, one point for each variant with its base cores."""
    rows = [row for row in read_rows(folder / PROFILES) if (row["pipeline"], row["origin"]) == (pipeline.name, "grid")]
    hardware = Hardware(processor="Intel Xeon Gold 6126, reconstructed", node_cores=96)
    points = {
        stage.name: [read_point(variant, variant.resources.cpu, rows) for variant in stage.variants]
        for stage in pipeline.spec.stages
    }
    return profiles_of(pipeline, points, hardware)


def profiles_of(
    pipeline: InferencePipeline, points: Mapping[str, Sequence[PointProfile]], hardware: Hardware
) -> dict[str, ModelProfile]:
    profiles = {}
    for stage, measured in points.items():
        spec = ModelProfileSpec(pipeline=pipeline.name, stage=stage, hardware=hardware, points=tuple(measured))
        profiles[stage] = ModelProfile(metadata=Metadata(name=f"{pipeline.name}-{stage}"), spec=spec)
    return profiles


def read_point(variant: Variant, cores: float, rows: Iterable[Mapping[str, str]]) -> PointProfile:
    """The measurements of a variant with so many cores; ValueError if there are none."""
    own = [row for row in rows if row["variant"] == variant.name and float(row["cores"]) == cores]
    if not own:
        raise ValueError(f"there are no profiles of {variant.name} with {cores:g} cores")
    measurements = tuple(map(_measurement, own))
    fit = fit_latency([m.batch_size for m in measurements], [m.latency_seconds_mean for m in measurements])
    return PointProfile(variant=variant.name, cores=cores, measurements=measurements, fit=fit)


def _measurement(row: Mapping[str, str]) -> Measurement:
    batch, throughput = int(row["batch"]), float(row["throughput_rps"])
    return Measurement(
        batch_size=batch,
        latency_seconds_mean=batch / throughput,
        latency_seconds_p50=float(row["latency_s_p50"]),
        latency_seconds_p99=float(row["latency_s_p99"]),
        throughput_rps=throughput,
        batches=BATCHES,
    )


def read_baseline_settings(folder: Path, pipeline: InferencePipeline) -> dict[str, dict[str, str]]:
    """Read what the paper's baselines ran, by stage; the file's stages are in the pipeline's order."""
    own = [row for row in read_rows(folder / STAGES) if row["pipeline"] == pipeline.name]
    rows = sorted(own, key=lambda row: int(row["stage"]))
    return dict(zip((stage.name for stage in pipeline.spec.ordered_stages), rows, strict=True))


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Means of a run of the paper."""

    cores: float
    accuracy: float


def read_recorded_runs(folder: Path) -> dict[tuple[str, ...], RecordedRun]:
    """Read the paper's published runs by (pipeline, workload, method)."""
    steps: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in read_rows(folder / TIMELINES):
        if row["run_set"] == "revision_product":
            key = (row["pipeline"], row["workload"], row["method"])
            steps[key].append((float(row["cost_cores"]), float(row["pas"])))
    means = {key: np.mean(values, axis=0) for key, values in steps.items()}
    return {key: RecordedRun(float(cores), float(accuracy) / 100.0) for key, (cores, accuracy) in means.items()}


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    yield from csv.DictReader(io.StringIO(text))
