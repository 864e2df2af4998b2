"""Serves the course, and keeps all that a simulation of it needs, so that it can be simulated again later."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.papers.planners import plan_for_peak
from benchmarks.simulator.calibration import once_a_batch
from benchmarks.simulator.course import Course, Figures
from benchmarks.simulator.pace import Pace, pace
from benchmarks.simulator.probe import probing, read
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder
from trimtab.run_record import load, save
from trimtab.run_samples import Run
from trimtab.terminal_view import terminal_view
from trimtab_adapter.planning.baselines import with_pins
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin

BATCH = 8
PROBED, CHANGED = "probed", "changes.json"


@dataclass(frozen=True, slots=True)
class Served:
    """The served run: its record, when its plan changed (seconds), how fast the machine was, and its figures."""

    course: Course
    """What of it is compared: the calm phases where these are enough, else all."""
    is_calm: bool
    """Whether they are enough."""
    results: Results
    run: Run
    changed_at: tuple[float, ...]
    pace: Pace
    figures: Figures

    def batch_rows(self, stage: str) -> float:
        """The mean rows of a stage's batches."""
        told = self.results.answered
        told = told[told[f"batch_size:{stage}"] > 0]
        return float(told[f"batch_size:{stage}"][once_a_batch(told, stage)].mean())


def serve(
    folder: Path, given: Path, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], course: Course
) -> None:
    """Serve the pipeline given, and write into the folder what happened."""
    first = plan_of(pipeline, profiles, course.phases[0].variants, 1)
    order = LoadOptions(course.load(capacity_rps(pipeline, first)), duration_seconds=float(course.ends[-1]), seed=1)
    with RunFolder() as where, probing(folder / PROBED):
        begun = asyncio.Event()
        changes = _Changes(pipeline, profiles, course, begun)
        session = LocalRun(
            "served", Setup(given, where, plan=first), order, fault_injector=lambda s: changes.follow(session, s)
        )
        with terminal_view(session, console):
            session.on_sample = _noticing(begun, session.on_sample)
            run = asyncio.run(session.run())
    save(run, folder)
    changed_at = [at - run.started_at for at in changes.written_at]
    (folder / CHANGED).write_text(json.dumps(changed_at), encoding="ascii")


def recorded(folder: Path, course: Course) -> Served:
    """Read what `serve` wrote."""
    run = load(folder)
    if run.results is None:
        raise RuntimeError("the load left no record; it was probably interrupted")
    records, facts = run.results.records, run.results.facts
    answered = records["outcome"] <= RequestOutcome.LATE
    readings, others = read(folder / PROBED)
    machine = pace(readings, facts.started_at, facts.duration_seconds, others)
    calm = course.calm(machine)
    is_calm = calm.is_enough
    compared = calm if is_calm else course
    return Served(
        course=compared,
        is_calm=is_calm,
        results=run.results,
        run=run,
        changed_at=tuple(json.loads((folder / CHANGED).read_text(encoding="ascii"))),
        pace=machine,
        figures=compared.figures(records["scheduled"], records["latency_seconds"], answered),
    )


@dataclass(slots=True)
class _Changes:
    """Writes the plans of the course when their phases begin, and notes the Unix time of each."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    course: Course
    begun: asyncio.Event
    written_at: list[float] = field(default_factory=list)

    async def follow(self, session: LocalRun, local: Supervisor) -> None:
        await self.begun.wait()
        if session.progress is None:
            raise RuntimeError("the load began without any progress")
        started = time.time() - session.progress.elapsed_seconds
        for generation, (at, variants) in enumerate(self.course.changes(), 2):
            await asyncio.sleep(max(started + at - time.time(), 0.0))
            plan = plan_of(self.pipeline, self.profiles, variants, generation)
            self.written_at.append(time.time())
            write_json(local.plan_file, plan)


def _noticing(begun: asyncio.Event, told: Callable[[LocalRun], None]) -> Callable[[LocalRun], None]:
    """Notice at each sample whether the load has begun."""

    def notice(session: LocalRun) -> None:
        if session.progress is not None:
            begun.set()
        told(session)

    return notice


def plan_of(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], variants: Mapping[str, str], generation: int
) -> PipelinePlan:
    """Plan one replica of each variant with a given batch size."""
    pins = {name: Pin(variant=variant, batch_size=BATCH, replicas=1) for name, variant in variants.items()}
    pinned = pipeline.model_copy(update={"spec": with_pins(pipeline.spec, pins)})
    plan = plan_for_peak(pinned, profiles, 1.0)
    return plan.model_copy(update={"spec": plan.spec.model_copy(update={"generation": generation})})


def capacity_rps(pipeline: InferencePipeline, plan: PipelinePlan) -> float:
    """The requests per second the scarcest stage of a plan carries by its profile."""
    rows = pipeline.spec.expected_rows
    return min(stage.throughput_rps / rows[stage.name] for stage in plan.spec.stages)
