"""One transformer at many speeds, served: the same queries by ours, OTAS as printed, its rivals, and every point alone.

Phases, each within ten minutes; the first finds the load at which three in ten queries at the plain point are not
answered in time. The others use it, and find it first where none is known for these settings:

- load: that load;
- shape: plateaus and bursts around it, every point alone and the policies;
- queued: more than that, so that twenty batches wait;
- looks: a merged pass for all and a better one for the doubted, beside every point alone, on images nobody has seen,
  saturated and in turns. Needs no load from before;
- tasks: tasks registered under load, mixed in batches, and after all replicas have died. Needs no load from before.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import aiohttp

from benchmarks.loads import KnownLoads, Settings, digest_of
from benchmarks.modalities.searching import sought
from benchmarks.profiles import profiled
from benchmarks.tokens_served.direct import Direct
from benchmarks.tokens_served.driving import BATCH, CORES, SOURCE, STAGE, VARIANT, plain, serving, shape_of
from benchmarks.tokens_served.looks import HEADS as LOOK_HEADS
from benchmarks.tokens_served.looks import LEAST_SPEED, MOST_LOST, Rows, compared, in_turns, ways
from benchmarks.tokens_served.outcome import HEADS, Run
from benchmarks.tokens_served.queries import Queries
from benchmarks.tokens_served.tasks import Tasks
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab.plan_view import terminal_table
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_profiler.profile import PROFILE_FILE
from trimtab_protocol import event_loop

OURS, OTAS = "ours", "OTAS as printed"
PETS, INFAAS = "PetS-like", "INFaaS-like, all loaded"
POLICIES = {OURS: "TokenAdaptive", OTAS: "Otas", "SlackFit": "SlackFit", PETS: "PetsLike", INFAAS: "InfaasLike"}
"""PetS has the plain point alone. INFaaS changes models, which takes seconds; here its points are loaded already."""
MISSED, CLOSE, TRIES = 0.3, 0.04, 12
LOAD = "three in ten missed"
QUEUED_TIMES = 1.6
Figures = dict[str, float | int | str | None]


class Bench:
    """What all phases share."""

    def __init__(self, given: argparse.Namespace, folder: Path, profiles: Mapping[str, ModelProfile]) -> None:
        self.given = given
        self.folder = folder
        self.profiles = profiles
        self.queries = Queries(given.deadline)
        self.goes = shape_of(given.trace, given.trace_start, given.seconds)
        self.known = KnownLoads(given.out / "load.json", settings_of(given))
        self._rps: float | None = None
        self.figures: Figures = {}
        self.bars: list[Threshold] = []

    async def rps(self) -> float:
        """The load of this run, or what an earlier one found under the same settings; else it is searched for."""
        if self._rps is None:
            self._rps = self.known.get(LOAD)
        return await self.load() if self._rps is None else self._rps

    async def load(self) -> float:
        """Find the load at which the plain point misses three in ten; one that is not found is not kept."""
        async with serving(
            SOURCE, self.folder / "load", "", "EarliestDeadlineFirst", self.profiles, self.queries, shape=self.goes
        ) as served:
            await served.keep_to(plain(served.points))

            async def offer(rps: float, seed: int) -> Run:
                run = await served.offer(rps, self.given.seconds, seed)
                console.print(f"{rps:.0f}/s: {100 * run.missed:.1f} % not in time")
                return run

            runs = await sought(offer, lambda run: run.missed, MISSED, self.given.first_rps, close=CLOSE, tries=TRIES)
        best = runs[-1]
        self._rps = rate = len(best.results.records) / best.results.facts.duration_seconds
        self.figures |= {"load: rps": rate, "load: missed at the plain point": best.missed}
        self.bars.append(found_load(best.missed))
        if self.bars[-1].holds:
            self.known.keep(LOAD, rate)
        self._tell("load", runs)
        return rate

    async def shape(self) -> None:
        """All on the same queries."""
        rps = await self.rps()
        runs = [*await self._alone("shape", rps), *await self._policies("shape", rps, POLICIES)]
        self._tell("shape", runs)
        by_name = {run.method: run for run in runs}
        ours = by_name[OURS]
        best = max((run for name, run in by_name.items() if name.startswith("always")), key=lambda run: run.utility)
        measured, *_ = ours.accuracy()
        self.figures["shape: best point alone"] = best.method
        self.bars += [
            threshold("utility over the best point alone, in hindsight, %", _gain(ours, best), ">=", 20.0),
            threshold(
                "measured accuracy off what was promised, points", _off(measured, ours.expected_accuracy), "<=", 2.0
            ),
        ]

    async def queued(self) -> None:
        """Ours against OTAS where twenty batches and more wait."""
        names = {name: POLICIES[name] for name in (OURS, OTAS)}
        runs = await self._policies("queued", QUEUED_TIMES * await self.rps(), names)
        self._tell("queued", runs)
        ours, theirs = runs
        self.figures["queued: batches waiting, most"] = theirs.most_queued / BATCH
        self.bars += [
            threshold("queued: most batches that waited", theirs.most_queued / BATCH, ">=", 20.0),
            threshold("queued: utility over OTAS as printed, %", _gain(ours, theirs), ">=", 10.0),
        ]

    async def looks(self) -> None:
        """Second looks beside single points, saturated."""
        folder, rows = self.folder / "looks", Rows.drawn()
        async with serving(SOURCE, folder, OURS, POLICIES[OURS], self.profiles, self.queries) as served:
            tried = ways(served.points)
            async with aiohttp.ClientSession() as session:
                await in_turns(Direct(session, served.replica_url, rows.pixels), tried, rows, self.given.rows)
        found = list(compared(tried))
        console.print(terminal_table(LOOK_HEADS, [one.line() for one in found], "looks"))
        for one in found:
            name = f"looks: {one.way.name}"
            self.figures |= {
                f"{name}: rows": len(one.way.right),
                f"{name}: rows/s": one.rows_per_second,
                f"{name}: times the plain point": one.speeds[1],
                f"{name}: points lost (95 %)": "{1:+.2f} ({0:+.2f} to {2:+.2f})".format(*(100 * x for x in one.lost)),
            }
        alone = [one.way.name for one in found if one.way.again is None and one.meets]
        self.figures["looks: points that meet the bar alone"] = ", ".join(alone) or "none"
        twice = max((one for one in found if one.way.again is not None), key=lambda one: (one.meets, one.speeds[1]))
        self.figures["looks: the bars are of"] = twice.way.name
        self.bars += [
            threshold("looks: throughput over the plain point's", twice.speeds[1], ">=", LEAST_SPEED),
            threshold("looks: accuracy lost, points", 100 * twice.lost[1], "<=", 100 * MOST_LOST),
            threshold("looks: rows by each way, least", min(len(one.way.right) for one in found), ">=", 2_000),
        ]

    async def tasks(self) -> None:
        """Tasks that join while others are served."""
        found = Tasks(SOURCE, self.folder / "tasks", self.queries)
        await found.run()
        for name, figure in found.figures.items():
            console.print(f"{name}: {figure:.4g}" if isinstance(figure, float) else f"{name}: {figure}", markup=False)
        self.figures |= found.figures
        self.bars += found.bars

    async def _alone(self, phase: str, rps: float) -> list[Run]:
        """Each point by itself."""
        folder = self.folder / f"{phase}-alone"
        async with serving(SOURCE, folder, "", "SlackFit", self.profiles, self.queries, shape=self.goes) as served:
            runs = []
            for point in served.points:
                await served.keep_to(point)
                runs.append(await served.offer(rps, self.given.seconds))
        return runs

    async def _policies(self, phase: str, rps: float, policies: Mapping[str, str]) -> list[Run]:
        runs = []
        for name, policy in policies.items():
            folder = self.folder / f"{phase}-{policy}"
            async with serving(SOURCE, folder, name, policy, self.profiles, self.queries, shape=self.goes) as served:
                if name == PETS:
                    await served.keep_to(plain(served.points), name)
                runs.append(await served.offer(rps, self.given.seconds))
        return runs

    def _tell(self, phase: str, runs: list[Run]) -> None:
        console.print(terminal_table(HEADS, [run.line() for run in runs], phase))
        for run in runs if phase != "load" else ():
            measured, low, high = run.accuracy()
            low_utility, high_utility = run.interval()
            self.figures |= {
                f"{phase}: {run.method}: queries": len(run.results.records),
                f"{phase}: {run.method}: utility": run.utility,
                f"{phase}: {run.method}: utility, 95 %": f"{low_utility:.1f}–{high_utility:.1f}",
                f"{phase}: {run.method}: utility by promise": run.expected_utility,
                f"{phase}: {run.method}: type 1": run.types[0],
                f"{phase}: {run.method}: not in time": run.missed,
                f"{phase}: {run.method}: accuracy, 95 %": f"{measured:.4f} ({low:.4f}–{high:.4f})",
                f"{phase}: {run.method}: promised": run.expected_accuracy,
            }


def settings_of(given: argparse.Namespace) -> Settings:
    """What the load at which three in ten are missed depends on."""
    profiled = digest_of(given.out / PROFILE_FILE)
    trace = f"{given.trace.resolve()} from second {given.trace_start}" if given.trace else None
    named = {"cores": CORES, "seconds": given.seconds, "deadline": given.deadline}
    return {**named, "trace": trace, "profile": profiled}


def found_load(missed: float) -> Threshold:
    """Whether a load is the one that was sought; others would compare policies where there is nothing to choose."""
    return threshold("load: share missed at the plain point, off three in ten", abs(missed - MISSED), "<=", CLOSE)


def _gain(one: Run, other: Run) -> float:
    return 100 * (one.utility / max(other.utility, 1e-9) - 1.0)


def _off(measured: float, promised: float) -> float:
    return 100 * abs(measured - promised)


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.tokens_served", description=__doc__)
    parser.add_argument(
        "--phase", choices=["load", "shape", "queued", "looks", "tasks"], action="append", help="only this; repeatable"
    )
    parser.add_argument("--seconds", type=int, default=16, help="of load in each run")
    parser.add_argument("--deadline", type=float, default=1.2, help="seconds, of queries in a hurry")
    parser.add_argument("--first-rps", type=float, default=200.0, help="where the search for the load begins")
    parser.add_argument(
        "--trace", type=Path, help="of requests per second: loads go as it does, not in plateaus of ours"
    )
    parser.add_argument("--trace-start", type=int, default=0, help="its second at which to begin")
    parser.add_argument("--rows", type=int, help="of phase looks; default: all there are, some 3,100")
    parser.add_argument("--out", type=Path, default=Path("out/tokens-served"))
    return run_reporting_errors(partial(_told, parser.parse_args()))


def _told(given: argparse.Namespace) -> int:
    shape_of(given.trace, given.trace_start, given.seconds)  # before minutes of profiling
    outcome = event_loop.run(_measured(given))
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


async def _measured(given: argparse.Namespace) -> ResultLine:
    profiles = await profiled(SOURCE, given.out, {STAGE: [VARIANT]})
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        bench = Bench(given, Path(folder), profiles)
        phases = {
            "load": bench.load,
            "shape": bench.shape,
            "queued": bench.queued,
            "looks": bench.looks,
            "tasks": bench.tasks,
        }
        for name in given.phase or phases:
            await phases[name]()
    return ResultLine(name="bench-tokens-served", figures=bench.figures, bars=tuple(bench.bars))


if __name__ == "__main__":
    sys.exit(main())
