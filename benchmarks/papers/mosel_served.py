"""MOSEL's evaluation, served: digits-av by five policies, each with a replica of its own."""

import argparse
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import benchmarks.papers.policies  # noqa: F401 - registers the baselines
from benchmarks.harness.grid import Cell, Evaluation, progress_bar
from benchmarks.harness.report import Page, Report
from benchmarks.harness.serving import (
    Profiles,
    ServedPipeline,
    cached_profiles,
    plan_pinned,
    search_goodput,
    serve,
    slow_down,
    write_pipeline,
)
from benchmarks.papers.mosel_jobs import (
    BY_LOAD,
    MAX_QUEUED_ROWS,
    MAX_VIOLATIONS,
    MOSEL,
    OURS,
    PLAIN,
    SLO_SECONDS,
    JobRow,
    Jobs,
    carried_rps,
    chart_by_load,
    completion_seconds,
    draw_jobs,
    met,
    violations,
)
from benchmarks.simulator.calibration import first_of_each_batch
from trimtab_adapter.simulation.sampling import interpolate_latency
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_loadtester.results import Results
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_protocol import event_loop

SOURCE = Path(__file__).parents[2] / "pipelines" / "digits-av"
MODEL, STAGE, VARIANT, ALL_MODALITIES = "digits-av", "name", "late", "all"
PIN = Pin(variant=VARIANT, replicas=1, batch_size=64)
METHODS = (OURS, MOSEL, PLAIN, "Aggressive", "Random")
POOL = 4_000
"""Distinct rows that jobs are made of: the sample size of an interval."""
PEAK_OVER_CARRIED = 2.0
"""The paper's load at its peak over what all modalities carry (section 7.1)."""
MAX_WORSE_POINTS = 1.0
"""By which one run may differ from another by chance."""
SEARCH_SECONDS = 6
WARM_SECONDS, WARM_SHARE = 2, 0.25
"""How long, and at which share of what all modalities carry, each router is warmed up."""


class JobPayloads:
    """Payloads of jobs: rows of digits with known labels, drawn by the options."""

    def __init__(self, jobs: Jobs, options: JobOptions) -> None:
        self._jobs = jobs
        self._options = options
        self._scoring = DigitsAvPayloads(jobs.seed, options)

    def payload(self, index: int) -> Payload:
        rows, floor = int(self._jobs.rows[index]), round(float(self._jobs.floors[index]), 4)
        options = replace(self._options, rows=(rows, rows), floor=(floor, floor))
        return DigitsAvPayloads(self._jobs.seed, options).payload(index)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the rows whose digit is right; KeyError if the response has no `digit`."""
        return self._scoring.score(truth, outputs)


def draw_recordings(recordings: Path | None) -> JobOptions:
    """Draw the rows that all jobs are made of.

    Raises ValueError if the recordings cannot be read, or have no speaker that the weights were not trained on.
    """
    text = f"pool={POOL}, drawn=0"
    if recordings is not None:
        text += f", recordings={recordings}, weights={SOURCE / 'weights' / f'{VARIANT}.safetensors'}"
    options = JobOptions.parse(text)
    DigitsAvPayloads(0, options)
    return options


def violated_share(results: Results) -> float:
    """Return the share of jobs without an answer in time that is expected to be as accurate as the job asked."""
    records = results.records
    floors = np.nan_to_num(records["floor"])
    met_both = (records["outcome"] == RequestOutcome.OK) & (records["expected_accuracy"] >= floors - 1e-3)
    return 1.0 - float(met_both.sum()) / max(len(records), 1)


def served_row(cell: Cell, results: Results) -> JobRow:
    """Sum up a served load; responses do not say how many rows were escalated."""
    records, answered = results.records, results.answered
    in_time = records["outcome"] == RequestOutcome.OK
    return JobRow(
        cell=cell,
        jobs=len(records),
        violations=1.0 - results.count(RequestOutcome.OK) / max(len(records), 1),
        met=1.0 - violated_share(results),
        accuracy=float(answered["expected_accuracy"].mean()) if len(answered) else float("nan"),
        answered_rps=float(records["total"][in_time].sum() / results.facts.duration_seconds),
        mean_seconds=float(answered["latency_seconds"].mean()) if len(answered) else float("nan"),
        pending=float((records["escalation_pending"] > 0).mean()),
        escalated=float("nan"),
    )


def measured_accuracy(results: Results) -> tuple[float, float, float]:
    """Return the share of answered rows that were right, and its 95 % interval."""
    answered = results.answered
    right, rows = int(answered["correct"].sum()), int(answered["total"].sum())
    if not rows:
        return float("nan"), float("nan"), float("nan")
    samples = min(rows, POOL)
    return right / rows, *wilson_interval(right / rows * samples, samples)


def expected_accuracy(results: Results) -> float:
    """Return the mean accuracy of the rows by the responses."""
    answered = results.answered
    return float(np.average(answered["expected_accuracy"], weights=answered["total"])) if len(answered) else np.nan


def service_ratio(results: Results, point: PointProfile) -> float:
    """Return the median of the seconds of batches over those of the profile.

    `results`: a load whose rows were all served at one point. `point`: the profile of that point. Raises ValueError if
    no job was answered.
    """
    answered = results.answered
    timed = answered[~np.isnan(answered[f"service_seconds:{STAGE}"]) & (answered[f"batch_size:{STAGE}"] > 0)]
    if not timed.size:
        raise ValueError(f"none of {len(results.records)} jobs was answered: the load is too high for this machine")
    batches = timed[first_of_each_batch(timed, STAGE)]
    expected = [interpolate_latency(point, size, 0.5) for size in batches[f"batch_size:{STAGE}"].tolist()]
    return float(np.median(batches[f"service_seconds:{STAGE}"] / expected))


def plan_load(method: str, pipeline: InferencePipeline, profiles: Profiles, rps: float, rows: float) -> PipelinePlan:
    """Return the plan for jobs of so many rows; only ours has escalations."""
    plan = plan_pinned(pipeline, profiles, {STAGE: PIN}, rps=rps, rows=rows)
    if method == OURS:
        return plan
    stages = tuple(with_shadow_price(_without_escalations(stage), rps * rows) for stage in plan.spec.stages)
    return plan.with_spec(stages=stages)


def _without_escalations(stage: StagePlan) -> StagePlan:
    bare: dict[str, Any] = {"escalations": (), "planned_escalation": None}
    for name in ("upgrades", "fallbacks"):
        bare[name] = tuple(point.replace(escalations=()) for point in getattr(stage, name))
    return stage.replace(**bare)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was served, one run a policy and load."""

    runs: Sequence[tuple[JobRow, Results]]
    """The figures and records of each."""
    trace: str
    max_rps: float
    """Rows a second that all modalities carry on this machine, measured first."""
    speed: float
    """Seconds of batches meanwhile over those of the profile; plans are based on the product."""
    cores: float
    is_limited: bool
    """Whether the replicas were limited to their cores."""
    items: str
    """What the rows were made of."""
    lost: int = 0
    """Runs during which a router was replaced, which is not the policy's doing."""

    @property
    def evaluation(self) -> Evaluation[JobRow]:
        return Evaluation(row for row, _ in self.runs)


@dataclass(slots=True)
class Bench:
    """The policies that are served at once, so that what else the machine does affects all alike."""

    served: Mapping[str, ServedPipeline]
    profiles: Profiles
    """Those of a replica with its share of a core, on which plans are based."""
    options: JobOptions
    """Which rows jobs are made of."""

    @property
    def accuracies(self) -> list[float]:
        variant = self.served[PLAIN].pipeline.spec.stage(STAGE).variant(VARIANT)
        return [point.accuracy for point in variant.points if point.accuracy is not None]

    @property
    def best_point(self) -> PointProfile:
        point = self.profiles[STAGE].spec.point(VARIANT, ALL_MODALITIES, 1.0)
        if point is None:
            raise RuntimeError(f"point {ALL_MODALITIES} of {VARIANT} was not measured")
        return point

    def draw_jobs(self, shape: NDArray[np.float64], max_rps: float, seed: int = 1) -> Jobs:
        return draw_jobs(shape, max_rps, self.accuracies, seed)

    async def offer(self, method: str, jobs: Jobs) -> Results:
        """Send jobs when they are due, under the plan for their mean load."""
        served = self.served[method]
        mean_rows = float(jobs.rows.mean())
        await served.follow(plan_load(method, served.pipeline, self.profiles, jobs.jobs_rps, mean_rows))
        return await served.attack(
            LoadSpec.parse(f"constant:{jobs.jobs_rps:g}"),
            jobs.seconds,
            JobPayloads(jobs, self.options),
            seed=jobs.seed,
            arrivals=jobs.arrivals_seconds,
            max_payloads=max(jobs.rows.size, 1),
        )

    async def measure_max_rps(self) -> tuple[float, float]:
        """Return the rows a second that all modalities carry, and the seconds of batches over the profile's."""
        best: Results | None = None

        async def holds(rows_rps: float) -> bool:
            nonlocal best
            results = await self.offer(PLAIN, self.draw_jobs(np.ones(SEARCH_SECONDS), rows_rps))
            is_held = violated_share(results) <= MAX_VIOLATIONS
            best = results if is_held else best
            return is_held

        first_rps = 0.8 * max(measurement.throughput_rps for measurement in self.best_point.measurements)
        await search_goodput(holds, first_rps)
        if best is None:
            raise RuntimeError(f"violated at every rate below {2 * first_rps:.3g} rows a second")
        rows_rps = served_row(Cell((MODEL,), PLAIN), best).answered_rps
        return rows_rps, service_ratio(best, self.best_point)


@asynccontextmanager
async def serve_policies(folder: Path, profiles: Profiles, cores: float) -> AsyncIterator[dict[str, ServedPipeline]]:
    """Serve by every policy, each with a replica of its own."""
    spec = {"slo": {"latency": f"{SLO_SECONDS:g}s"}, "queue": {"maxRows": MAX_QUEUED_ROWS}}
    async with AsyncExitStack() as stack:
        served = {}
        for method in METHODS:
            pipeline = write_pipeline(SOURCE, folder / method, schedulingPolicy=method, **spec)
            plan = plan_load(method, pipeline, profiles, 1.0, 1.0)
            served[method] = await stack.enter_async_context(serve(folder / method, pipeline, plan, cores))
        yield served


def serve_all(shape: NDArray[np.float64], trace: str, items: JobOptions, options: argparse.Namespace) -> Comparison:
    """Serve every policy at every load, in turns."""
    return event_loop.run(_serve_all(shape, trace, items, options))


async def _serve_all(
    shape: NDArray[np.float64], trace: str, items: JobOptions, options: argparse.Namespace
) -> Comparison:
    measured = await cached_profiles(SOURCE, options.out, {STAGE: [VARIANT]})
    profiles = slow_down(measured, 1.0 / options.cores)
    cells = [Cell((MODEL,), method, factor) for factor in options.loads for method in METHODS]
    runs: list[tuple[JobRow, Results]] = []
    lost = 0
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder, progress_bar() as bar:
        task = bar.add_task("what all modalities carry", total=1 + len(cells))
        async with serve_policies(Path(folder), profiles, options.cores) as served:
            bench = Bench(served, profiles, items)
            max_rps, speed = await bench.measure_max_rps()
            bench.profiles = slow_down(profiles, speed)  # plans must not depend on how busy the machine was before
            for method in METHODS:
                await bench.offer(method, bench.draw_jobs(np.ones(WARM_SECONDS), WARM_SHARE * max_rps, seed=2))
            bar.advance(task)
            for cell in cells:
                bar.update(task, description=f"served: {cell.method}, load {cell.factor:g}")
                router_pid = served[cell.method].router_pid
                results = await bench.offer(
                    cell.method, bench.draw_jobs(shape, PEAK_OVER_CARRIED * cell.factor * max_rps)
                )
                lost += router_pid != served[cell.method].router_pid
                runs.append((served_row(cell, results), results))
                bar.advance(task)
    is_limited = all(each.is_limited for each in served.values())
    source = f"recordings in {items.recordings}" if items.recordings else "synthesised voices"
    return Comparison(runs, trace, max_rps, speed, options.cores, is_limited, source, lost)


def judge(comparison: Comparison, report: Report) -> None:
    """Add what was served to a report, compared with MOSEL's policy."""
    served = comparison.evaluation
    report.add(
        {
            "served_recordings": comparison.items,
            "served_cores": comparison.cores,
            "served_replica_held_to_its_cores": int(comparison.is_limited),
            "served_all_senses_carry_rows_rps": comparison.max_rps,
            "served_batches_over_profile": comparison.speed,
            "served_jobs": sum(row.jobs for row, _ in comparison.runs),
        }
    )
    for method in METHODS:
        key, mean = f"served_{method.lower()}", partial(served.mean, (MODEL,), method)
        report.add({f"{key}_violations": mean(violations), f"{key}_met": mean(met)})
        report.add({f"{key}_completion_seconds": mean(completion_seconds)})
        report.add({f"{key}_carried_rows_rps": carried_rps(served, MODEL, method)})
    more_lost, more_met = (
        100 * (served.mean((MODEL,), OURS, figure) - served.mean((MODEL,), MOSEL, figure))
        for figure in (violations, met)
    )
    report.hold("served: loads in which a router was lost", comparison.lost, "==", 0)
    report.hold("served: violations of ours beyond MOSEL's, points", more_lost, "<=", MAX_WORSE_POINTS)
    report.hold("served: jobs that met both SLOs with ours beyond MOSEL's, points", more_met, ">=", -MAX_WORSE_POINTS)


COLUMNS = (
    "load",
    "policy",
    "jobs",
    "violations",
    "both met",
    "completion",
    "expected",
    "measured (95 %)",
    "escalation pending",
)
TABLE_NOTE = (
    "Violations: jobs without an answer in time. Both met: in time and, by expectation, as accurate as the job "
    "asked. Completion: mean seconds of the answered jobs. Expected: accuracy of rows by the responses. Measured: "
    "rows that were right."
)


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each load and policy."""
    return [_table_row(*run) for run in comparison.runs]


def _table_row(row: JobRow, results: Results) -> tuple[str, ...]:
    accuracy, low, high = measured_accuracy(results)
    return (
        f"{row.cell.factor:g}",
        row.cell.method,
        str(row.jobs),
        f"{100 * row.violations:.1f} %",
        f"{100 * row.met:.1f} %",
        f"{row.mean_seconds:.2f} s",
        f"{expected_accuracy(results):.3f}",
        f"{accuracy:.3f} ({low:.3f}–{high:.3f})",
        f"{100 * row.pending:.1f} %",
    )


def add_sections(page: Page, comparison: Comparison) -> None:
    """Add what was served to the page, with the paper's charts."""
    served = comparison.evaluation
    page.add_notes("digits-av, served", _lead(comparison))
    for name, note, figure, y in BY_LOAD:
        page.add_chart(f"digits-av: {name}", note, chart_by_load(served, {"": MODEL}, METHODS, figure, y))
    page.add_table("digits-av: all figures", TABLE_NOTE, COLUMNS, table_rows(comparison), range(2, len(COLUMNS)))


def _lead(comparison: Comparison) -> str:
    cores = f"{comparison.cores:g} of a core" if comparison.is_limited else "an unlimited share of the machine's cores"
    lost = f" In {comparison.lost} of these loads a router was lost and replaced." if comparison.lost else ""
    return (
        f"Five policies, each with a replica of its own that has {cores}, get the same jobs in turns at every load: "
        f"{comparison.items}, load: {comparison.trace}. All modalities carry {comparison.max_rps:.0f} rows a second "
        f"here, in batches that take {comparison.speed:.2f} times what the profile says; plans are based on that.{lost}"
    )
