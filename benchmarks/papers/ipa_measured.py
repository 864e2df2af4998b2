"""Profiles of IPA's variants measured on this machine, with base allocations and SLOs by equation 1 and section 4.1.

A stage gets one row, as in the paper: of its pipeline's payloads the one of median length. What it reads of an
earlier stage is a sentence, or a whole picture.
"""

import asyncio
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.papers import ipa_data
from benchmarks.papers.ipa_checkpoints import write_checkpoint
from trimtab.options import console
from trimtab_model_servers.weights.files import SINGLE_FILE
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.profile import Hardware, ModelProfile, PointProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_profiler import inputs
from trimtab_profiler.base_allocation import base_allocation, stage_slo_seconds
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ROWS, ProfileOptions, profile

SHIPPED = Path(__file__).with_suffix(".csv")
"""Measured on two cores."""
CORES = (1.0, 2.0)
BATCH_SIZES = (1, 2, 4, 8)
LONGEST_BATCH_SECONDS = 3.0
"""No larger batch of a variant is measured, or planned with, once one takes longer."""
PEAK_WAIT = 0.125
"""Share of the SLO for which every planner lets rows of the busiest second wait: SLOs are seconds."""
OPTIONS = ProfileOptions(
    effort=Effort(seconds=0.3, min_batches=4, max_seconds=0.6, rounds=1),
    cores=CORES,
    batch_sizes=BATCH_SIZES,
    longest_batch_seconds=LONGEST_BATCH_SECONDS,
)
SAME = {("audio-sent", "transcribe"): "audio-qa", ("sum-qa", "answer"): "audio-qa"}
"""Stages that are measured in another pipeline: the same variants on inputs of the same lengths."""
PICTURE = f"{REQUEST}.inputs.image"
COLUMNS = ("pipeline", "stage", "variant", "cores", "batch", "latency_s_p50", "latency_s_p99", "throughput_rps")


def read_measured(
    pipeline: InferencePipeline, file: Path, settings: Mapping[str, Mapping[str, str]]
) -> tuple[InferencePipeline, dict[str, ModelProfile]]:
    """A pipeline with base allocations, SLO and batch sizes by its measured profiles, and these profiles.

    A variant that no measured allocation lets serve the paper's base load of its stage gets the largest one. Raises
    UserError if a stage was not measured.
    """
    rows = list(ipa_data.read_rows(file))
    points: dict[str, list[PointProfile]] = {}
    stages: list[Stage] = []
    slo_seconds = 0.0
    for stage in map(_on_one_core, pipeline.spec.stages):
        source = SAME.get((pipeline.name, stage.name), pipeline.name)
        own = [row for row in rows if (row["pipeline"], row["stage"]) == (source, stage.name)]
        if not own:
            raise UserError(f"{file} has no profiles of {source}: {stage.name}; --measure FILE measures them")
        measured = [ipa_data.read_point(variant, cores, own) for variant in stage.variants for cores in CORES]
        stage_seconds = stage_slo_seconds(measured, stage)
        slo_seconds += stage_seconds
        threshold_rps = float(settings[stage.name]["threshold_rps_paper"])
        base = dict.fromkeys((variant.name for variant in stage.variants), CORES[-1])
        base |= base_allocation(measured, stage, stage_seconds, threshold_rps)
        points[stage.name] = [point for point in measured if point.cores == base[point.variant]]
        variants = tuple(_with_cores(variant, base[variant.name]) for variant in stage.variants)
        stages.append(stage.replace(variants=variants, batch_sizes=BATCH_SIZES))
    slo = pipeline.spec.slo.replace(latency_seconds=slo_seconds)
    adaptation = pipeline.spec.adaptation.replace(peak_wait=PEAK_WAIT)
    hardware = Hardware(processor="measured", node_cores=96)
    return pipeline.with_spec(stages=tuple(stages), slo=slo, adaptation=adaptation), ipa_data.profiles_of(
        pipeline, points, hardware
    )


def _with_cores(variant: Variant, cores: float) -> Variant:
    return variant.replace(resources=variant.resources.replace(cpu=cores))


def _on_one_core(stage: Stage) -> Stage:
    return stage.replace(variants=tuple(_with_cores(variant, CORES[0]) for variant in stage.variants))


def measure(pipelines: Sequence[InferencePipeline], file: Path, checkpoints: Path) -> None:
    """Append the stages that a file of profiles lacks; write the checkpoints that a folder lacks."""
    rows = ipa_data.read_rows(file) if file.exists() else []
    done = {(row["pipeline"], row["stage"]) for row in rows}
    for pipeline in pipelines:
        for stage in pipeline.spec.ordered_stages:
            if (pipeline.name, stage.name) not in done | SAME.keys():
                console.print(f"{pipeline.name}: {stage.name}: measuring {len(stage.variants)} variants")
                for variant in stage.variants:
                    if not (checkpoints / variant.name / SINGLE_FILE).exists():
                        write_checkpoint(variant, checkpoints / variant.name)
                _append(file, _measure_stage(_with_checkpoints(pipeline, checkpoints), stage.name))


def _with_checkpoints(pipeline: InferencePipeline, folder: Path) -> InferencePipeline:
    """A pipeline whose replicas have one core, and the checkpoints of a folder."""

    def change(variant: Variant) -> Variant:
        parameters = variant.parameters | ({"threshold": 0.0} if "rtdetr" in variant.name else {})
        return variant.replace(storage_uri=str((folder / variant.name).absolute()), parameters=parameters)

    stages = [_on_one_core(stage) for stage in pipeline.spec.stages]
    changed = (stage.replace(variants=tuple(map(change, stage.variants))) for stage in stages)
    return pipeline.with_spec(stages=tuple(changed))


def _measure_stage(pipeline: InferencePipeline, name: str) -> ModelProfile:
    stage, drawn = pipeline.spec.stage(name), inputs.request_rows(pipeline, ROWS)
    if PICTURE in drawn:
        drawn["detect.outputs.crop"] = drawn[PICTURE]
    by_input = inputs.stage_rows(pipeline, stage, drawn, ROWS)
    rows = {each.source: _median_row(by_input[each.name]) for each in stage.inputs}
    only = {name: [variant.name for variant in stage.variants]}
    return asyncio.run(profile(pipeline, Path(), replace(OPTIONS, rows=rows, only=only)))[name]


def _median_row(rows: inputs.Array) -> inputs.Array:
    """The row of median length of byte strings [rows], [1]."""
    return rows[np.argsort([len(row) for row in rows])[[len(rows) // 2]]]


def _append(file: Path, measured: ModelProfile) -> None:
    exists = file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        if not exists:
            writer.writerow(COLUMNS)
        for point in measured.spec.points:
            where = (measured.spec.pipeline, measured.spec.stage, point.variant, f"{point.cores:g}")
            for m in point.measurements:
                seconds = (m.latency_seconds_p50, m.latency_seconds_p99)
                writer.writerow((*where, m.batch_size, *(f"{s:.6f}" for s in seconds), f"{m.throughput_rps:.4f}"))
