"""Profiles a pipeline: every stage, variant, operating point, allocation of cores and batch size, on real replicas.

Stages are taken in the order of the pipeline, so that each is fed what the most accurate variant before it answers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import psutil

from trimtab_pipelines.documents import dump_yaml, write_atomically
from trimtab_pipelines.profile import (
    ChatProfile,
    LatencyCurve,
    Measurement,
    ModelProfile,
    ModelProfileSpec,
    PointProfile,
)
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_profiler import chat_profile, inputs
from trimtab_profiler.base_allocation import base_allocation, stage_slo_seconds
from trimtab_profiler.fit import fit_latency
from trimtab_profiler.hardware import this_machine, usable_cores
from trimtab_profiler.measure import FULL, QUICK, Batch, Effort, Samples, measure_round
from trimtab_profiler.measurement_grid import GridPoint, grid, share
from trimtab_profiler.model_identity import model_identity
from trimtab_profiler.replica import Refused, Replica, running_replica

ROWS = 64
BATCHES_PER_POINT = 4
MEMORY_SHARE = 0.5
PROFILE_FILE = "profile.yaml"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How thoroughly to measure.

    Attributes:
        effort: how long each batch size is measured.
        cores: allocations measured for each variant beside the one it declares.
        batch_sizes: none means the powers of two up to 64.
        planned_batches_only: measure no batch sizes but those each stage plans with.
        longest_batch_seconds: a variant's larger batches are left out once one takes longer; None measures them all.
        threshold_rps: base load, in rows per second, a replica of the base allocation must carry.
        seed: of random inputs.
        only: the variants to measure of each stage; a stage without any is left out, None measures all.
    """

    effort: Effort = FULL
    cores: tuple[float, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    planned_batches_only: bool = False
    longest_batch_seconds: float | None = None
    threshold_rps: float = 1.0
    seed: int = 0
    only: Mapping[str, Sequence[str]] | None = None

    @classmethod
    def full(cls, node_cores: int | None = None) -> "ProfileOptions":
        """About 2 s a point, for each variant's own cores and 1, 2, 4 … whole cores of this machine."""
        most = node_cores or usable_cores()
        return cls(cores=tuple(float(2**power) for power in range(most.bit_length())))

    @classmethod
    def quick(cls, pipeline: InferencePipeline, only: Mapping[str, Sequence[str]] | None = None) -> "ProfileOptions":
        """About 0.25 s a point: own cores, batch sizes worth planning with, none that takes longer than the SLO."""
        slo_seconds = pipeline.spec.slo.latency_seconds
        return cls(effort=QUICK, planned_batches_only=True, longest_batch_seconds=slo_seconds, only=only)

    def measured(self, stage: Stage) -> Stage:
        """A stage with none but the variants to measure, perhaps without any."""
        if self.only is None:
            return stage
        wanted = self.only.get(stage.name, ())
        variants = tuple(variant for variant in stage.variants if variant.name in wanted)
        return stage.model_copy(update={"variants": variants})


@dataclass(frozen=True, slots=True)
class Progress:
    """A batch size was visited with `threads` cores: visit `done` of `total`, and what is known of it so far."""

    done: int
    total: int
    stage: str
    variant: str
    operating_point: str
    threads: int
    measurement: Measurement


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Session:
    """What one profiling carries from stage to stage."""

    pipeline: InferencePipeline
    folder: Path
    options: ProfileOptions
    on_progress: OnProgress | None
    rows: dict[str, inputs.Array]
    total: int = 0
    done: int = 0
    grids: dict[str, list[GridPoint]] = field(default_factory=dict)
    strangers: Iterator[int] = field(default_factory=count)

    def tell(self, stage: Stage, point: GridPoint, measurement: Measurement) -> None:
        self.done += 1
        if self.on_progress is not None:
            names = (stage.name, point.variant, point.operating_point)
            self.on_progress(Progress(self.done, self.total, *names, point.threads, measurement))


async def profile(
    pipeline: InferencePipeline,
    pipeline_folder: Path,
    options: ProfileOptions | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, ModelProfile]:
    """Measure a pipeline and return the profile of each of its stages.

    Args:
        pipeline: what to measure.
        pipeline_folder: relative storage URIs start here.
        options: None means `ProfileOptions.full()`.
        on_progress: called after each visit of a batch size.

    Raises:
        ProfileError: a variant cannot be loaded or refuses a batch.
        ValueError: a variant asks for more cores than there are, or its annotations cannot be read.
    """
    options = options or ProfileOptions.full()
    rows = inputs.request_rows(pipeline, ROWS, options.seed)
    session = _Session(pipeline, pipeline_folder, options, on_progress, rows)
    stages = [stage for stage in map(options.measured, pipeline.spec.ordered_stages) if stage.variants]
    for stage in stages:
        sizes = stage.batch_sizes if options.planned_batches_only else options.batch_sizes
        session.grids[stage.name] = grid(stage, options.cores, usable_cores(), sizes)
        visits = sum(len(point.batch_sizes) for point in session.grids[stage.name])
        if chat_profile.may_differ(stage, inputs.stage_rows(pipeline, stage, rows, ROWS)):
            visits = chat_profile.KINDS * visits + len(chat_profile.LENGTHS) * len(session.grids[stage.name])
        session.total += visits * options.effort.rounds
    return {stage.name: await _profile_stage(session, stage) for stage in stages}


def write_profiles(profiles: Mapping[str, ModelProfile], folder: Path) -> Path:
    """Write the profiles as one document a stage into profile.yaml of a folder, and return its path."""
    path = folder / PROFILE_FILE
    write_atomically(path, dump_yaml(*profiles.values()))
    return path


@dataclass(frozen=True, slots=True)
class FitError:
    """How far the law is from one measurement: (fit − measured) / measured."""

    stage: str
    variant: str
    operating_point: str
    cores: float
    batch_size: int
    measured_seconds: float
    fitted_seconds: float

    @property
    def relative_error(self) -> float:
        """Below 0 where the law promises less time than was measured."""
        return self.fitted_seconds / self.measured_seconds - 1


def fit_errors(profiles: Mapping[str, ModelProfile]) -> list[FitError]:
    """Compare the law with every measurement it was fitted to."""
    return [
        FitError(
            stage=stage,
            variant=point.variant,
            operating_point=point.operating_point,
            cores=point.cores,
            batch_size=measured.batch_size,
            measured_seconds=measured.latency_seconds_mean,
            fitted_seconds=point.fit.seconds(measured.batch_size),
        )
        for stage, document in profiles.items()
        for point in document.spec.points
        for measured in point.measurements
    ]


def replica_groups(variants: Iterable[Variant], memory_bytes: float) -> list[list[str]]:
    """Share variants out over replicas, in order, so that each replica's declared memory stays within a bound."""
    groups: list[list[str]] = []
    used = 0
    for variant in variants:
        if not groups or used + variant.resources.memory > memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(variant.name)
        used += variant.resources.memory
    return groups


async def _profile_stage(session: _Session, stage: Stage) -> ModelProfile:
    rows = inputs.stage_rows(session.pipeline, stage, session.rows, ROWS)
    best = max(stage.variants, key=lambda variant: variant.accuracy)
    points: list[PointProfile] = []
    for threads in sorted({point.threads for point in session.grids[stage.name]}):
        wanted = [point for point in session.grids[stage.name] if point.threads == threads]
        hosted = [variant for variant in stage.variants if variant.name in {point.variant for point in wanted}]
        for group in replica_groups(hosted, MEMORY_SHARE * psutil.virtual_memory().available):
            async with running_replica(session.pipeline, session.folder, stage.name, group, threads) as replica:
                for point in wanted:
                    if point.variant in group:
                        points += await _profile_point(session, stage, point, replica, rows)
                if best.name in group and f"{stage.name}.outputs.{stage.outputs[0].name}" not in session.rows:
                    session.rows |= await _capture(session, stage, best, replica, rows)
    return _document(session, stage, points)


async def _profile_point(
    session: _Session, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows
) -> list[PointProfile]:
    """Measure all batch sizes of a point, then state them for each allocation it stands for.

    Batches hold what the router would send: not the inputs that the point or its variant does not read. What writes is
    also measured to the first piece of its answers, and with chats that show nothing.
    """
    carried = stage.variant(point.variant).point(point.operating_point).batch_inputs(stage.inputs)
    left_out = session.pipeline.spec.stage(stage.name).excluded_input(point.variant)  # also where not all are measured
    rows = {name: array for name, array in rows.items() if name != left_out and (carried is None or name in carried)}
    measurements = await _measure(session, stage, point, replica, rows)
    if not chat_profile.may_differ(stage, rows):
        return [point_profile(point, cores, measurements) for cores in point.allocations]
    sizes = replace(point, batch_sizes=tuple(m.batch_size for m in measurements))
    text, begun, text_begun = [
        await _measure(session, stage, sizes, replica, other)
        for other in (
            chat_profile.textual(rows),
            chat_profile.first_token_only(rows),
            chat_profile.first_token_only(chat_profile.textual(rows)),
        )
    ]
    size, datatypes = min(ROWS, sizes.batch_sizes[-1]), inputs.datatypes(session.pipeline, stage)
    answered, read = [
        (await replica.infer(point.variant, point.operating_point, inputs.batch(each, size, 0, datatypes))).outputs
        for each in (rows, chat_profile.first_token_only(chat_profile.textual(rows)))
    ]
    reading = await _measure_reading(
        session, stage, point, replica, chat_profile.first_token_only(chat_profile.textual(rows))
    )
    return [
        point_profile(point, cores, measurements).model_copy(
            update={
                "chats": ChatProfile(
                    time_to_first_token=curve(begun, cores),
                    text_only=curve(text, cores),
                    text_only_time_to_first_token=curve(text_begun, cores),
                    tokens=chat_profile.mean_tokens(answered),
                    prompt_tokens=chat_profile.mean_prompt_tokens(answered),
                    text_prompt_tokens=chat_profile.mean_prompt_tokens(read),
                    prefill_seconds=_rising({tokens: share(one, cores) for tokens, one in reading.items()}),
                )
            }
        )
        for cores in point.allocations
    ]


async def _measure(
    session: _Session, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows
) -> list[Measurement]:
    """Measure all batch sizes of a point with some rows."""
    options, datatypes = session.options, inputs.datatypes(session.pipeline, stage)

    async def serve(batch: Batch) -> None:
        await replica.infer(
            point.variant, point.operating_point, chat_profile.without_shared_prefix(batch, next(session.strangers))
        )

    visited = {size: Samples(size) for size in point.batch_sizes}
    for visit in range(options.effort.rounds):
        for size, samples in tuple(visited.items()):
            batches = [inputs.batch(rows, size, n * size, datatypes) for n in range(BATCHES_PER_POINT)]
            await measure_round(serve, batches, samples, options.effort)
            measurement = samples.measurement()
            session.tell(stage, point, measurement)
            # A pause of the machine may hold up most of a few batches, but it makes none quicker.
            if visit == 0 and min(samples.latencies_seconds) > (options.longest_batch_seconds or math.inf):
                larger = [other for other in visited if other > size]
                session.done += len(larger) * options.effort.rounds
                for other in larger:
                    del visited[other]
                break
    return [samples.measurement() for samples in visited.values()]


async def _measure_reading(
    session: _Session, stage: Stage, point: GridPoint, replica: Replica, rows: inputs.Rows
) -> dict[int, Measurement]:
    """Measure prompts longer and longer, one at a time, by their tokens: as long as the replica takes them."""
    options, datatypes = session.options, inputs.datatypes(session.pipeline, stage)
    few = {name: array[:BATCHES_PER_POINT] for name, array in rows.items()}
    lengths: dict[int, inputs.Rows] = {}
    for times in chat_profile.LENGTHS:
        longer = chat_profile.with_longer_prompt(few, times)
        batch = inputs.batch(longer, min(BATCHES_PER_POINT, point.batch_sizes[-1]), 0, datatypes)
        try:
            read = (await replica.infer(point.variant, point.operating_point, batch)).outputs
        except Refused:
            if not lengths:
                raise
            break
        lengths[round(chat_profile.mean_prompt_tokens(read))] = longer
    session.done += (len(chat_profile.LENGTHS) - len(lengths)) * options.effort.rounds
    found: dict[int, Measurement] = {}
    for tokens, prompts in lengths.items():
        found[tokens] = (await _measure(session, stage, replace(point, batch_sizes=(1,)), replica, prompts))[0]
        if found[tokens].latency_seconds_p50 > (options.longest_batch_seconds or math.inf):
            session.done += (len(lengths) - len(found)) * options.effort.rounds
            break
    return found


def _rising(measured: Mapping[int, Measurement]) -> dict[int, float]:
    """Median seconds by tokens; what took less than fewer tokens did, by chance, takes as long as those."""
    tokens = sorted(measured)
    seconds = np.maximum.accumulate([measured[each].latency_seconds_p50 for each in tokens])
    return dict(zip(tokens, seconds.tolist(), strict=True))


def point_profile(point: GridPoint, cores: float, measurements: Sequence[Measurement]) -> PointProfile:
    """State what was measured with whole threads for an allocation of cores, with the law fitted to it."""
    found = curve(measurements, cores)
    return PointProfile(
        variant=point.variant,
        operating_point=point.operating_point,
        cores=cores,
        measurements=found.measurements,
        fit=found.fit,
    )


def curve(measurements: Sequence[Measurement], cores: float) -> LatencyCurve:
    """What was measured with whole threads, for an allocation of cores."""
    shared = tuple(share(measurement, cores) for measurement in measurements)
    law = fit_latency([m.batch_size for m in shared], [m.latency_seconds_mean for m in shared])
    return LatencyCurve(measurements=shared, fit=law)


async def _capture(
    session: _Session, stage: Stage, variant: Variant, replica: Replica, rows: inputs.Rows
) -> dict[str, inputs.Array]:
    """Run a variant over all rows, for the stages that read what it answers."""
    datatypes = inputs.datatypes(session.pipeline, stage)
    left_out = session.pipeline.spec.stage(stage.name).excluded_input(variant.name)
    rows = {name: array for name, array in rows.items() if name != left_out}
    size = min(variant.max_batch_size, ROWS)
    answers = [
        await replica.infer(variant.name, variant.points[0].name, inputs.batch(rows, size, start, datatypes))
        for start in range(0, ROWS, size)
    ]
    return inputs.captured(stage, [answer.outputs for answer in answers])


def _left_some_out(session: _Session, stage: Stage, points: Iterable[PointProfile]) -> bool:
    """Whether sizes of some point were not measured since smaller ones took too long."""
    wanted = {(one.variant, one.operating_point): len(one.batch_sizes) for one in session.grids[stage.name]}
    return any(len(point.measurements) < wanted[point.variant, point.operating_point] for point in points)


def _document(session: _Session, stage: Stage, points: Sequence[PointProfile]) -> ModelProfile:
    slo_seconds = stage_slo_seconds(points, stage)
    return ModelProfile(
        metadata=Metadata(name=f"{session.pipeline.name}-{stage.name}"[:63].rstrip("-")),
        spec=ModelProfileSpec(
            pipeline=session.pipeline.name,
            stage=stage.name,
            hardware=this_machine(),
            models={variant.name: model_identity(variant, session.folder) for variant in stage.variants},
            points=tuple(points),
            base_allocation=dict(base_allocation(points, stage, slo_seconds, session.options.threshold_rps)),
            stage_slo_seconds=slo_seconds,
            longest_batch_seconds=session.options.longest_batch_seconds
            if _left_some_out(session, stage, points)
            else None,
        ),
    )
