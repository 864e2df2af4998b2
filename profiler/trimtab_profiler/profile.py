"""Profile of a pipeline: every stage, variant, operating point, allocation of cores and batch size, on real replicas.

Stages are measured in the order of the pipeline; each gets the outputs of the most accurate variant before it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from trimtab_pipelines.documents import dump_yaml, write_atomically
from trimtab_pipelines.memory_profile import MemoryProfile, with_shared_bytes
from trimtab_pipelines.profile import (
    ChatProfile,
    LatencyCurve,
    Measurement,
    ModelProfile,
    ModelProfileSpec,
    PointProfile,
)
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.synthetic_inputs import payloads_of
from trimtab_pipelines.variants import Variant
from trimtab_profiler import chat_profile, inputs
from trimtab_profiler.base_allocation import base_allocation, stage_slo_seconds
from trimtab_profiler.engine_replica import running_engine
from trimtab_profiler.fit import fit_latency
from trimtab_profiler.identity import BusyShare, model_identity, this_machine, usable_cores
from trimtab_profiler.measure import FULL, QUICK, Batch, Effort, Samples, measure_round
from trimtab_profiler.measurement_grid import GridPoint, grid, scale_to_cores
from trimtab_profiler.memory import RESIDENT, measure_memory, read_bytes
from trimtab_profiler.replica import BatchRejected, Replica, check_models, running_replica

ROWS = 64
BATCHES_PER_POINT = 4
PROFILE_FILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Extent of a profiling run."""

    effort: Effort = FULL
    cores: tuple[float, ...] = ()
    """Allocations of each variant besides the one it declares."""
    batch_sizes: tuple[int, ...] = ()
    """Empty: the powers of two up to 64."""
    planned_batches_only: bool = False
    """Measure only the batch sizes that a stage plans with."""
    longest_batch_seconds: float | None = None
    """Skip larger batches of a variant once one takes longer."""
    threshold_rps: float = 1.0
    """Base load, in rows per second, that a replica of the base allocation must serve."""
    seed: int = 0
    """Of random inputs."""
    rows: inputs.Rows | None = None
    """Rows of samples by request input; None measures the pipeline's payloads, or rows drawn at random."""
    only: Mapping[str, Sequence[str]] | None = None
    """Variants to measure by stage; None measures all."""

    @classmethod
    def full(cls, node_cores: int | None = None) -> "ProfileOptions":
        """About 2 s per point, with each variant's declared cores and 1, 2, 4 … cores of this machine."""
        max_cores = node_cores or usable_cores()
        return cls(cores=tuple(float(2**power) for power in range(max_cores.bit_length())))

    @classmethod
    def quick(cls, pipeline: InferencePipeline, only: Mapping[str, Sequence[str]] | None = None) -> "ProfileOptions":
        """About 0.25 s per point, with declared cores and planned batch sizes, up to the SLO."""
        slo_seconds = pipeline.spec.slo.latency_seconds
        return cls(effort=QUICK, planned_batches_only=True, longest_batch_seconds=slo_seconds, only=only)

    def select_variants(self, stage: Stage) -> Stage:
        if self.only is None:
            return stage
        names = self.only.get(stage.name, ())
        return stage.replace(variants=tuple(variant for variant in stage.variants if variant.name in names))


@dataclass(frozen=True, slots=True)
class Progress:
    """Round `done` of `total` has ended for a batch size, with its measurement so far."""

    done: int
    total: int
    stage: str
    variant: str
    operating_point: str
    threads: int
    measurement: Measurement


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Run:
    """State of a profiling run."""

    pipeline: InferencePipeline
    folder: Path
    options: ProfileOptions
    on_progress: OnProgress
    rows: dict[str, inputs.Array]
    sources: frozenset[str]
    """What the measured stages read."""
    total: int = 0
    done: int = 0
    grids: dict[str, list[GridPoint]] = field(default_factory=dict)
    tenants: Iterator[int] = field(default_factory=count)

    def needs_outputs_of(self, stage: Stage) -> bool:
        prefix = f"{stage.name}.outputs."
        return any(source.startswith(prefix) for source in self.sources - self.rows.keys())

    def report(self, stage: Stage, point: GridPoint, measurement: Measurement) -> None:
        self.done += 1
        names = (stage.name, point.variant, point.operating_point)
        self.on_progress(Progress(self.done, self.total, *names, point.threads, measurement))


async def profile(
    pipeline: InferencePipeline,
    pipeline_folder: Path,
    options: ProfileOptions | None = None,
    on_progress: OnProgress = lambda _: None,
) -> dict[str, ModelProfile]:
    """Measure a pipeline, in full unless `options` are given, and return the profile of each of its stages.

    Relative storage URIs start at `pipeline_folder`; `on_progress` is called after each round of a batch size. Raises
    InputRejected if a model is invalid, ProfileError if a replica fails or rejects a batch, ValueError if a variant
    requests more cores than the machine has, or an annotation is invalid.
    """
    options = options or ProfileOptions.full()
    rows = dict(options.rows or inputs.request_rows(pipeline, ROWS, options.seed))
    stages = [stage for stage in map(options.select_variants, pipeline.spec.ordered_stages) if stage.variants]
    sources = frozenset(each.source for stage in stages for each in stage.inputs)
    run = _Run(pipeline, pipeline_folder, options, on_progress, rows, sources)
    for stage in stages:
        sizes = stage.batch_sizes if options.planned_batches_only else options.batch_sizes
        run.grids[stage.name] = grid(stage, options.cores, usable_cores(), sizes)
        visits = sum(len(point.batch_sizes) for point in run.grids[stage.name])
        own_rows = inputs.stage_rows(pipeline, stage, rows, ROWS)
        if chat_profile.needs_chat_profile(stage, own_rows):
            visits *= chat_profile.measured_kinds(own_rows)
            visits += len(chat_profile.LENGTHS) * len(run.grids[stage.name])
        run.total += visits * options.effort.rounds
    if len(stages) > 1:
        await check_models(pipeline, pipeline_folder, stages)
    busy_share = BusyShare()
    profiles = {stage.name: await _profile_stage(run, stage) for stage in stages}
    busy = busy_share.read()
    return {name: profile.with_spec(busy_share=busy) for name, profile in profiles.items()}


def write_profiles(profiles: Mapping[str, ModelProfile], folder: Path) -> Path:
    """Write the profiles into profile.yaml of a folder, one document per stage; return its path."""
    path = folder / PROFILE_FILE
    write_atomically(path, dump_yaml(*profiles.values()))
    return path


def fit_errors(profiles: Mapping[str, ModelProfile]) -> list[float]:
    """Relative error of the latency law at every measurement: (fit − measured) / measured."""
    return [
        point.fit.seconds(measured.batch_size) / measured.latency_seconds_mean - 1
        for profile in profiles.values()
        for point in profile.spec.points
        for measured in point.measurements
    ]


async def _profile_stage(run: _Run, stage: Stage) -> ModelProfile:
    rows = inputs.stage_rows(run.pipeline, stage, run.rows, ROWS)
    best = max(stage.variants, key=lambda variant: variant.accuracy)
    points: list[PointProfile] = []
    memory: dict[str, MemoryProfile] = {}
    threads = 1
    for threads in sorted({point.threads for point in run.grids[stage.name]}):
        grid_points = [point for point in run.grids[stage.name] if point.threads == threads]
        names = {point.variant for point in grid_points}
        variants = [variant for variant in stage.variants if variant.name in names]
        for variant in variants:
            own = [point for point in grid_points if point.variant == variant.name]
            async with _running(run, stage, variant, threads) as replica:
                if found := await _measure_memory(run, stage, own, replica, rows):
                    memory[variant.name] = found
                for point in own:
                    points += await _profile_point(run, stage, point, replica, rows)
                if variant is best and run.needs_outputs_of(stage):
                    run.rows |= await _capture(run, stage, best, replica, rows)
    return _document(run, stage, points, await _with_shared_bytes(run, stage, memory, threads))


def _running(run: _Run, stage: Stage, variant: Variant, threads: int) -> AbstractAsyncContextManager[Replica]:
    if variant.container is not None:
        return running_engine(stage, variant.name, run.folder)
    return running_replica(run.pipeline, run.folder, stage.name, [variant.name], threads)


async def _profile_point(
    run: _Run, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows
) -> list[PointProfile]:
    """Measure all batch sizes of a point, and scale them to each of its allocations.

    Batches have only the inputs that the router sends. Generation stages are also measured to the first token, and with
    chats without images.
    """
    rows = _sent_rows(run, stage, point, rows)
    measurements = await _measure(run, stage, point, replica, rows)
    if not chat_profile.needs_chat_profile(stage, rows):
        return [point_profile(point, cores, measurements) for cores in point.allocations]
    sizes = replace(point, batch_sizes=tuple(m.batch_size for m in measurements))
    texts = chat_profile.without_images(rows)
    short_texts = chat_profile.first_token_only(texts)
    text_only, text_only_first_token = measurements, await _measure(run, stage, sizes, replica, short_texts)
    first_token = text_only_first_token
    if chat_profile.have_images(rows):
        text_only = await _measure(run, stage, sizes, replica, texts)
        first_token = await _measure(run, stage, sizes, replica, chat_profile.first_token_only(rows))
    size, datatypes = min(ROWS, sizes.batch_sizes[-1]), inputs.datatypes(run.pipeline, stage)
    outputs, text_outputs = [
        (await replica.infer(point.variant, point.operating_point, inputs.batch(chat_rows, size, 0, datatypes))).outputs
        for chat_rows in (rows, short_texts)
    ]
    prefill = await _measure_prefill(run, stage, point, replica, short_texts)
    prompt_tokens, tokens = chat_profile.mean_tokens(outputs)
    text_prompt_tokens, _ = chat_profile.mean_tokens(text_outputs)
    return [
        point_profile(point, cores, measurements).replace(
            chats=ChatProfile(
                time_to_first_token=curve(first_token, cores),
                text_only=curve(text_only, cores),
                text_only_time_to_first_token=curve(text_only_first_token, cores),
                tokens=tokens,
                prompt_tokens=prompt_tokens,
                text_prompt_tokens=text_prompt_tokens,
                prefill_seconds=_rising({tokens: scale_to_cores(each, cores) for tokens, each in prefill.items()}),
            )
        )
        for cores in point.allocations
    ]


def _sent_rows(run: _Run, stage: Stage, point: GridPoint, rows: inputs.Rows) -> dict[str, inputs.Array]:
    """The inputs that the router sends to a point."""
    sent = stage.variant(point.variant).point(point.operating_point).batch_inputs(stage.inputs)
    excluded = run.pipeline.spec.stage(stage.name).excluded_input(point.variant)
    return {name: array for name, array in rows.items() if name != excluded and (sent is None or name in sent)}


async def _infer(run: _Run, stage: Stage, point: GridPoint, replica: Replica, batch: Batch) -> None:
    """Serve a batch; one of chats has a new tenant, so that it reuses no cached prefix."""
    tenant = f"profile-{next(run.tenants)}" if stage.serves_chats else ""
    await replica.infer(point.variant, point.operating_point, batch, tenant)


async def _measure_memory(
    run: _Run, stage: Stage, points: Sequence[GridPoint], replica: Replica, rows: inputs.Rows
) -> MemoryProfile | None:
    """Measure the memory of a variant over all of its points; None if its process is a user's."""
    if replica.pid is None:
        return None
    datatypes = inputs.datatypes(run.pipeline, stage)

    async def serve(size: int) -> None:
        for point in points:
            batch = inputs.batch(_sent_rows(run, stage, point, rows), size, 0, datatypes)
            await _infer(run, stage, point, replica, batch)

    longest_seconds = len(points) * (run.options.longest_batch_seconds or math.inf)
    return await measure_memory(replica.pid, serve, points[0].batch_sizes, longest_seconds)


async def _with_shared_bytes(
    run: _Run, stage: Stage, memory: Mapping[str, MemoryProfile], threads: int
) -> dict[str, MemoryProfile]:
    """Load the variants of each replica group together, which shows what they share."""
    shared = dict(memory)
    for group in replica_groups(stage):
        alone = {name: memory[name] for name in group.names & memory.keys()}
        if len(alone) > 1:
            async with running_replica(run.pipeline, run.folder, stage.name, sorted(alone), threads) as replica:
                if replica.pid is not None:
                    shared |= with_shared_bytes(alone, read_bytes(replica.pid, RESIDENT))
    return shared


async def _measure(run: _Run, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows) -> list[Measurement]:
    options, datatypes = run.options, inputs.datatypes(run.pipeline, stage)

    async def serve(batch: Batch) -> None:
        await _infer(run, stage, point, replica, batch)

    samples_of = {size: Samples(size) for size in point.batch_sizes}
    for round_number in range(options.effort.rounds):
        for size, samples in tuple(samples_of.items()):
            batches = [inputs.batch(rows, size, n * size, datatypes) for n in range(BATCHES_PER_POINT)]
            await measure_round(serve, batches, samples, options.effort)
            measurement = samples.measurement()
            run.report(stage, point, measurement)
            # A pause of the machine may delay most of a few batches, but it makes none faster.
            if round_number == 0 and min(samples.latencies_seconds) > (options.longest_batch_seconds or math.inf):
                run.done += sum(other > size for other in samples_of) * options.effort.rounds
                samples_of = {other: taken for other, taken in samples_of.items() if other <= size}
                break
    return [samples.measurement() for samples in samples_of.values()]


async def _measure_prefill(
    run: _Run, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows
) -> dict[int, Measurement]:
    """Measure longer and longer prompts, one at a time, until the replica rejects them; by number of tokens."""
    options, datatypes = run.options, inputs.datatypes(run.pipeline, stage)
    few = {name: array[:BATCHES_PER_POINT] for name, array in rows.items()}
    lengths: dict[int, inputs.Rows] = {}
    for times in chat_profile.LENGTHS:
        longer = chat_profile.with_longer_prompt(few, times)
        batch = inputs.batch(longer, min(BATCHES_PER_POINT, point.batch_sizes[-1]), 0, datatypes)
        try:
            outputs = (await replica.infer(point.variant, point.operating_point, batch)).outputs
        except BatchRejected:
            if not lengths:
                raise
            break
        lengths[round(chat_profile.mean_tokens(outputs)[0])] = longer
    run.done += (len(chat_profile.LENGTHS) - len(lengths)) * options.effort.rounds
    measurements: dict[int, Measurement] = {}
    for tokens, prompts in lengths.items():
        measurements[tokens] = (await _measure(run, stage, replace(point, batch_sizes=(1,)), replica, prompts))[0]
        if measurements[tokens].latency_seconds_p50 > (options.longest_batch_seconds or math.inf):
            run.done += (len(lengths) - len(measurements)) * options.effort.rounds
            break
    return measurements


def _rising(measured: Mapping[int, Measurement]) -> dict[int, float]:
    """Median seconds by tokens, made monotone."""
    tokens = sorted(measured)
    seconds = np.maximum.accumulate([measured[each].latency_seconds_p50 for each in tokens])
    return dict(zip(tokens, seconds.tolist(), strict=True))


def point_profile(point: GridPoint, cores: float, measurements: Sequence[Measurement]) -> PointProfile:
    names = {"variant": point.variant, "operating_point": point.operating_point}
    return PointProfile(**names, cores=cores, **dict(curve(measurements, cores)))


def curve(measurements: Sequence[Measurement], cores: float) -> LatencyCurve:
    scaled = tuple(scale_to_cores(measurement, cores) for measurement in measurements)
    law = fit_latency([m.batch_size for m in scaled], [m.latency_seconds_mean for m in scaled])
    return LatencyCurve(measurements=scaled, fit=law)


async def _capture(
    run: _Run, stage: Stage, variant: Variant, replica: Replica, rows: inputs.Rows
) -> dict[str, inputs.Array]:
    """Run a variant over all rows, for the stages that read its outputs."""
    datatypes = inputs.datatypes(run.pipeline, stage)
    excluded = run.pipeline.spec.stage(stage.name).excluded_input(variant.name)
    rows = {name: array for name, array in rows.items() if name != excluded}
    size = min(variant.max_batch_size, ROWS)
    answers = [
        await replica.infer(variant.name, variant.points[0].name, inputs.batch(rows, size, start, datatypes))
        for start in range(0, ROWS, size)
    ]
    return inputs.concatenate_outputs(stage, [answer.outputs for answer in answers])


def _document(
    run: _Run, stage: Stage, points: Sequence[PointProfile], memory: Mapping[str, MemoryProfile]
) -> ModelProfile:
    slo_seconds = stage_slo_seconds(points, stage)
    sizes = {(point.variant, point.operating_point): len(point.batch_sizes) for point in run.grids[stage.name]}
    skipped = any(len(point.measurements) < sizes[point.variant, point.operating_point] for point in points)
    return ModelProfile(
        metadata=Metadata(name=f"{run.pipeline.name}-{stage.name}"[:63].rstrip("-")),
        spec=ModelProfileSpec(
            pipeline=run.pipeline.name,
            stage=stage.name,
            hardware=this_machine(),
            models={variant.name: model_identity(variant, run.folder) for variant in stage.variants},
            points=tuple(points),
            memory=dict(memory),
            base_allocation=dict(base_allocation(points, stage, slo_seconds, run.options.threshold_rps)),
            stage_slo_seconds=slo_seconds,
            longest_batch_seconds=run.options.longest_batch_seconds if skipped else None,
            inputs="Samples" if run.options.rows else "Payloads" if payloads_of(run.pipeline) != "random" else "Drawn",
        ),
    )
