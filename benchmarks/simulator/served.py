"""Served run of the simulator benchmark, recorded in a folder so that it can be simulated again."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.serving import plan_pinned
from benchmarks.simulator.calibration import first_of_each_batch
from benchmarks.simulator.machine import MachineRecord, machine_record, probing, read_readings
from benchmarks.simulator.phases import Figures, PhaseSequence
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder
from trimtab.run_record import load, save
from trimtab.run_samples import Run
from trimtab.terminal_view import terminal_view
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
    """A served run with its record, the machine's speed and the figures."""

    phases: PhaseSequence
    """Without disturbed phases if enough remain, else all."""
    is_undisturbed: bool
    """Whether enough remain."""
    results: Results
    run: Run
    changed_at: tuple[float, ...]
    """Seconds of the changes of plan."""
    machine: MachineRecord
    figures: Figures

    def batch_rows(self, stage: str) -> float:
        """Mean rows of a stage's batches."""
        records = self.results.answered
        records = records[records[f"batch_size:{stage}"] > 0]
        return float(records[f"batch_size:{stage}"][first_of_each_batch(records, stage)].mean())


def serve(
    folder: Path, source: Path, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], phases: PhaseSequence
) -> None:
    """Serve the pipeline at a path and write the record into the folder."""
    first = plan_of(pipeline, profiles, phases.phases[0].variants, 1)
    options = LoadOptions(phases.load(capacity_rps(pipeline, first)), duration_seconds=float(phases.ends[-1]), seed=1)
    with RunFolder() as run_folder, probing(folder / PROBED):
        begun = asyncio.Event()
        changes = _PlanChanges(pipeline, profiles, phases, begun)
        session = LocalRun(
            "served", Setup(source, run_folder, plan=first), options, fault_injector=lambda s: changes.apply(session, s)
        )
        with terminal_view(session, console):
            session.on_sample = _set_when_loaded(begun, session.on_sample)
            run = asyncio.run(session.run())
    save(run, folder)
    changed_at = [at - run.started_at for at in changes.written_at]
    (folder / CHANGED).write_text(json.dumps(changed_at), encoding="ascii")


def recorded(folder: Path, phases: PhaseSequence) -> Served:
    """Read the record that `serve` wrote."""
    run = load(folder)
    if run.results is None:
        raise RuntimeError("the load left no record; it was probably interrupted")
    records, facts = run.results.records, run.results.facts
    answered = records["outcome"] <= RequestOutcome.LATE
    readings, others = read_readings(folder / PROBED)
    machine = machine_record(readings, facts.started_at, facts.duration_seconds, others)
    undisturbed = phases.without_disturbed(machine)
    compared = undisturbed if undisturbed.is_sufficient else phases
    return Served(
        phases=compared,
        is_undisturbed=undisturbed.is_sufficient,
        results=run.results,
        run=run,
        changed_at=tuple(json.loads((folder / CHANGED).read_text(encoding="ascii"))),
        machine=machine,
        figures=compared.figures(records["scheduled"], records["latency_seconds"], answered),
    )


@dataclass(slots=True)
class _PlanChanges:
    """Writes each plan when its phase begins, and records the Unix time."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    phases: PhaseSequence
    begun: asyncio.Event
    written_at: list[float] = field(default_factory=list)

    async def apply(self, session: LocalRun, local: Supervisor) -> None:
        await self.begun.wait()
        if session.progress is None:
            raise RuntimeError("the load began without progress")
        started = time.time() - session.progress.elapsed_seconds
        for generation, (at, variants) in enumerate(self.phases.changes(), 2):
            await asyncio.sleep(max(started + at - time.time(), 0.0))
            plan = plan_of(self.pipeline, self.profiles, variants, generation)
            self.written_at.append(time.time())
            write_json(local.plan_file, plan)


def _set_when_loaded(begun: asyncio.Event, on_sample: Callable[[LocalRun], None]) -> Callable[[LocalRun], None]:
    """Set an event at the first sample after the load began."""

    def call(session: LocalRun) -> None:
        if session.progress is not None:
            begun.set()
        on_sample(session)

    return call


def plan_of(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], variants: Mapping[str, str], generation: int
) -> PipelinePlan:
    """Plan one replica of each variant with a given batch size."""
    pins = {name: Pin(variant=variant, batch_size=BATCH, replicas=1) for name, variant in variants.items()}
    plan = plan_pinned(pipeline, profiles, pins, rps=1.0)
    return plan.with_spec(generation=generation)


def capacity_rps(pipeline: InferencePipeline, plan: PipelinePlan) -> float:
    """Requests per second of a plan's bottleneck stage."""
    rows = pipeline.spec.expected_rows
    return min(stage.throughput_rps / rows[stage.name] for stage in plan.spec.stages)
