"""The paper's figures as files: workload excerpts, profiles, baselines' settings and recorded runs."""

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.profile import Hardware, Measurement, ModelProfile, ModelProfileSpec, PointProfile
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.trace import Trace, TraceError, read_trace
from trimtab_profiler.fit import fit_latency

TRACE, PROFILES = "twitter_rps_train.csv.gz", "ipa_profiles.csv"
STAGES, TIMELINES = "ipa_pipelines.csv", "ipa_timelines.csv.gz"
PIPELINES = ("video", "audio-qa", "audio-sent", "sum-qa", "nlp")
DAMPING = 8
BATCHES = 100

# Look-alikes of the paper's excerpts in the training part, by the paper's own rules (seconds of the trace).
EXCERPTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "bursty": ((869160, 870360),),
    "steady_low": ((694200, 695400),),
    "steady_high": ((416040, 416640), (416040, 416640)),
    "fluctuating": ((869400, 870000), (882000, 882600)),
}
# The paper's own, in the part that is held out; for a trace file that has it.
PUBLISHED_EXCERPTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "bursty": ((1301160, 1302360),),
    "steady_low": ((1299600, 1300800),),
    "steady_high": ((1768800, 1769400), (1768800, 1769400)),
    "fluctuating": ((1301400, 1302000), (1308600, 1309200)),
}


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests per second, [S], and what came in the seconds before, [H]."""

    name: str
    rates_rps: NDArray[np.float64]
    history_rps: tuple[int, ...]


def missing_files(folder: Path, trace: Path | None) -> list[Path]:
    """Name what is not there."""
    wanted = [folder / PROFILES, folder / STAGES, folder / TIMELINES, trace or folder / TRACE]
    return [path for path in wanted if not path.exists()]


def workloads(trace_file: Path, offset_seconds: int, *, published: bool) -> list[Workload]:
    """Cut the excerpts out of a trace; its second 0 is the recording's second `offset_seconds`.

    Raises:
        TraceError: it cannot be read, or has not all of them.
    """
    trace = read_trace(trace_file).divided(DAMPING, whole=True)
    excerpts = PUBLISHED_EXCERPTS if published else EXCERPTS
    try:
        return [_workload(name, trace, pieces, offset_seconds) for name, pieces in excerpts.items()]
    except TraceError as error:
        known = "the excerpts are seconds of the recording; --trace-start says at which of them the trace begins"
        raise TraceError(f"{error}; {known}") from error


def _workload(name: str, trace: Trace, pieces: tuple[tuple[int, int], ...], offset_seconds: int) -> Workload:
    cut = [trace.excerpt(start - offset_seconds, end - offset_seconds).rps for start, end in pieces]
    first = pieces[0][0] - offset_seconds
    before = _after_gaps(trace.rps[max(first - MEMORY_SECONDS, 0) : first])
    return Workload(name, np.nan_to_num(np.concatenate(cut)), tuple(int(count) for count in before))


def _after_gaps(rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """What follows the last missing second: a service that counted nothing in a gap would have seen jumps."""
    missing = np.flatnonzero(np.isnan(rps))
    return rps[missing[-1] + 1 :] if missing.size else rps


def profiles(folder: Path, pipeline: InferencePipeline) -> dict[str, ModelProfile]:
    """Read a pipeline's profiles: the complete grid, one point for each variant with its base cores."""
    rows = list(_rows(folder / PROFILES))
    return {stage.name: _profile(pipeline.name, stage, rows) for stage in pipeline.spec.stages}


def _profile(pipeline: str, stage: Stage, rows: list[dict[str, str]]) -> ModelProfile:
    points = tuple(_point(pipeline, variant, rows) for variant in stage.variants)
    hardware = Hardware(processor="Intel Xeon Gold 6126, reconstructed", node_cores=96)
    spec = ModelProfileSpec(pipeline=pipeline, stage=stage.name, hardware=hardware, points=points)
    return ModelProfile(metadata=Metadata(name=f"{pipeline}-{stage.name}"), spec=spec)


def _point(pipeline: str, variant: Variant, rows: list[dict[str, str]]) -> PointProfile:
    own = [
        row
        for row in rows
        if (row["pipeline"], row["variant"], row["origin"]) == (pipeline, variant.name, "grid")
        and float(row["cores"]) == variant.resources.cpu
    ]
    if not own:
        cores = f"{variant.resources.cpu:g} cores"
        raise ValueError(f"{PROFILES} has no grid rows of {pipeline}, {variant.name} with {cores}")
    measured = tuple(_measurement(row) for row in own)
    fit = fit_latency([m.batch_size for m in measured], [m.latency_seconds_mean for m in measured])
    return PointProfile(variant=variant.name, cores=variant.resources.cpu, measurements=measured, fit=fit)


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


@dataclass(frozen=True, slots=True)
class Published:
    """The baselines' settings in the paper, by stage of the manifest."""

    fa2_low: Mapping[str, str]
    fa2_high: Mapping[str, str]
    rim_replicas: Mapping[str, int]


def published(folder: Path, pipeline: InferencePipeline) -> Published:
    """Read what the paper's baselines ran; the file's stages stand in the pipeline's order."""
    rows = sorted((r for r in _rows(folder / STAGES) if r["pipeline"] == pipeline.name), key=lambda r: int(r["stage"]))
    named = list(zip((stage.name for stage in pipeline.spec.ordered_stages), rows, strict=True))
    return Published(
        fa2_low={name: row["fa2_low"] for name, row in named},
        fa2_high={name: row["fa2_high"] for name, row in named},
        rim_replicas={name: int(row["rim_replicas_high_load"]) for name, row in named},
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """Means of a run of the paper."""

    cores: float
    accuracy: float


def recorded(folder: Path) -> dict[tuple[str, str, str], Recorded]:
    """The paper's published runs by (pipeline, workload, method)."""
    sums: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(folder / TIMELINES):
        if row["run_set"] == "revision_product":
            key = (row["pipeline"], row["workload"], row["method"])
            sums[key].append((float(row["cost_cores"]), float(row["pas"])))
    return {
        key: Recorded(float(np.mean([c for c, _ in steps])), float(np.mean([a for _, a in steps])) / 100.0)
        for key, steps in sums.items()
    }


def _rows(path: Path) -> Iterator[dict[str, str]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    yield from csv.DictReader(io.StringIO(text))
