"""Serves digits-av by every policy, one after the other at each load, and has the same jobs simulated."""

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluating import progress
from benchmarks.modalities import setting as settings
from benchmarks.modalities.driving import Serving, serving
from benchmarks.modalities.run import Run
from benchmarks.modalities.searching import most_carried
from benchmarks.modalities.setting import SOURCE, STAGE, VARIANT, Jobs, Setting, slowed
from benchmarks.modalities.simulated import Simulating
from benchmarks.mosel.beside import METHODS, MODEL, MOSEL, PLAIN, Beside, Pair, paired
from benchmarks.mosel.cells import MOST_QUEUED_ROWS, OURS, SLO_SECONDS, Cell, simulated_measures
from benchmarks.mosel.conditions import conditions_of
from benchmarks.mosel.playing import PEAK_OVER_CARRIED, Played, PlayedPayloads, constant, played
from benchmarks.profiles import profiled
from trimtab_adapter.simulation.environment import Environment
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile, PointProfile

SERVED_AS: Mapping[str, str] = {
    OURS: settings.OURS,
    MOSEL: settings.MOSEL,
    PLAIN: settings.NONE,
    "Aggressive": settings.AGGRESSIVE,
    "Random": settings.RANDOM,
}
WHOLE = "all"
"""The point that has every sense."""
SEARCH_SECONDS, FINENESS = 6, 1.08
WARM_SECONDS, WARM_SHARE = 2, 0.25
"""And how much of what all senses carry a router meets first."""
CHANGES = {"slo": {"latency": f"{SLO_SECONDS:g}s"}, "queue": {"maxRows": MOST_QUEUED_ROWS}}


@dataclass(frozen=True, slots=True)
class Once:
    """A cell that was served, under which plan, and whether its router was lost meanwhile."""

    cell: Cell
    run: Run
    jobs: Played
    plan: PipelinePlan
    lost: bool


@dataclass(slots=True)
class Bench:
    """What all cells share; `goes` is how the load goes, [S], 0 … 1."""

    folder: Path
    profiles: Mapping[str, ModelProfile]
    options: JobOptions
    goes: NDArray[np.float64]
    cores: float

    @property
    def accuracies(self) -> list[float]:
        """Those of all subsets."""
        variant = self.setting(PLAIN).write().spec.stage(STAGE).variant(VARIANT)
        return [point.accuracy for point in variant.points if point.accuracy is not None]

    def setting(self, method: str) -> Setting:
        """How a policy serves."""
        return Setting(self.folder / method, SOURCE, SERVED_AS[method], self.cores, changes=CHANGES)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Mapping[str, Serving]]:
        """Serve by every policy at once, so that they take turns at each load and the machine's moods hit all alike."""
        async with AsyncExitStack() as stack:
            yield {
                method: await stack.enter_async_context(serving(self.setting(method), self.profiles))
                for method in METHODS
            }

    async def carried(self, served: Serving) -> Run:
        """The most it carries with one violation in a hundred, in jobs as the paper's."""

        async def offer(rows_rps: float) -> Run:
            jobs = constant(rows_rps, SEARCH_SECONDS, self.accuracies, seed=1)
            return (await self._offered(served, jobs))[0]

        first_rps = self.cores * max(one.throughput_rps for one in self._point(self.profiles).measurements)
        return await most_carried(offer, 0.8 * first_rps, fineness=FINENESS)

    async def warmed_up(self, served: Serving, rows_rps: float) -> None:
        """Have its router work out, for a few jobs, what it keeps of a plan's points: once, before what is compared."""
        await self._offered(served, constant(rows_rps, WARM_SECONDS, self.accuracies, seed=2))

    async def once(self, served: Serving, method: str, factor: float, carried_rps: float) -> Once:
        """Offer one cell's load."""
        jobs = played(self.goes, PEAK_OVER_CARRIED * factor * carried_rps, self.accuracies, seed=1)
        before = served.router
        run, plan = await self._offered(served, jobs)
        jobs = jobs.in_turns(run.results.facts.distinct_payloads)
        return Once(Cell(MODEL, method, factor), run, jobs, plan, lost=before != served.router)

    def conditions(self, run: Run) -> Environment:
        """What a load that had all senses tells of the machine."""
        return conditions_of(run, self._point(slowed(self.profiles, 1.0 / self.cores)))

    def beside(self, once: Once, conditions: Environment) -> Pair:
        """The same jobs simulated, under the same plan, on such a machine."""
        setting, jobs = self.setting(once.cell.method), once.jobs
        simulating = Simulating(setting, setting.write(), self.profiles)
        rows = tuple(jobs.rows.tolist())
        found = simulating.play(
            jobs.arrivals_seconds, jobs.seconds, rows, jobs.wishes, once.plan, seed=jobs.seed, conditions=conditions
        )
        simulated = simulated_measures(once.cell, found, jobs.rows, jobs.floors, STAGE)
        return paired(once.run, simulated)

    async def _offered(self, served: Serving, jobs: Played) -> tuple[Run, PipelinePlan]:
        plan = await served.follow(jobs.jobs_rps, jobs.mean_rows)
        source = PlayedPayloads(jobs, self.options)
        return await served.play(source, jobs.arrivals_seconds, jobs.seconds, jobs.seed), plan

    @staticmethod
    def _point(profiles: Mapping[str, ModelProfile]) -> PointProfile:
        found = profiles[STAGE].spec.point(VARIANT, WHOLE, 1.0)
        if found is None:
            raise RuntimeError(f"point {WHOLE} of {VARIANT} was not measured")
        return found


def drawn(recordings: Path | None) -> JobOptions:
    """Draw the rows that all jobs are made of; returns what they are.

    Raises:
        ValueError: the recordings cannot be read, or have no speaker whom the weights have not heard.
    """
    options = JobOptions.parse(Jobs.of(SOURCE, recordings).options)
    DigitsAvPayloads(0, options)
    return options


async def beside(
    goes: NDArray[np.float64], trace: str, options: JobOptions, loads: Sequence[float], cores: float, out: Path
) -> Beside:
    """Serve every policy at every load, then simulate what was served."""
    profiles = await profiled(SOURCE, out, {STAGE: [VARIANT]})
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder, progress() as shown:
        bench = Bench(Path(folder), profiles, options, goes, cores)
        cells = [(method, factor) for factor in loads for method in METHODS]
        task = shown.add_task("what all senses carry", total=1 + len(cells))
        found: list[Once] = []
        async with bench.serving() as served:
            run = await bench.carried(served[PLAIN])
            carried_rps, speed = run.answered_rows_rps, bench.conditions(run).service_ratios[STAGE, VARIANT]
            bench.profiles = slowed(bench.profiles, speed)
            for one in served.values():  # else they would stand on how busy the machine was when it was profiled
                one.profiles = slowed(one.profiles, speed)
                await bench.warmed_up(one, WARM_SHARE * carried_rps)
            shown.console.print(f"all senses carry {carried_rps:.0f} rows a second")
            shown.advance(task)
            for method, factor in cells:
                shown.update(task, description=f"served: {method}, load {factor:g}")
                found.append(once := await bench.once(served[method], method, factor, carried_rps))
                shown.console.print(f"{method}, load {factor:g}: {100 * once.run.late:.1f} % violations")
                shown.advance(task)
        is_held = all(one.is_held for one in served.values())
        conditions = {one.cell.factor: bench.conditions(one.run) for one in found if one.cell.method == PLAIN}
        pairs = [bench.beside(one, conditions[one.cell.factor]) for one in found]
    if not is_held:
        sys.stderr.write("this machine holds no process to its cores: the replicas took what they got\n")
    lost = sum(one.lost for one in found)
    items = f"recordings in {options.recordings}" if options.recordings else "synthesised voices"
    return Beside(pairs, trace, carried_rps, speed, cores, is_held, conditions, items, lost)
