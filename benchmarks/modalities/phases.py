"""The phases of the evaluation: what is offered to whom, and what has to come of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.loads import KnownLoads
from benchmarks.modalities.driving import Serving, serving
from benchmarks.modalities.run import Run
from benchmarks.modalities.searching import most_carried, violating
from benchmarks.modalities.setting import NONE, ONCE, OURS, POOL, STAGE, VARIANT, Jobs, Setting
from benchmarks.modalities.simulated import Asked, Simulating
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.result_line import Threshold, threshold

LEAST_JOBS = 2_000
POINT = 0.01
"""Of accuracy."""
SIMULATED_SECONDS = 12.0
DEAF_RPS = 20.0
BROKEN_SECONDS, AFTER_SECONDS, SETTLED_SECONDS = 30.0, 120.0, 60.0
"""When the microphone breaks, how long it is watched after that, and of these the last that are taken for the truth."""


@dataclass(frozen=True, slots=True)
class Found:
    """Figures and bars of a phase."""

    figures: dict[str, float | int | str | None]
    bars: list[Threshold]


@dataclass(slots=True)
class Bench:
    """What all phases share; `known` remembers what each method carries under these settings."""

    folder: Path
    source: Path
    profiles: Mapping[str, ModelProfile]
    known: KnownLoads
    recordings: Path | None
    seconds: float
    cores: float
    rows: str
    floor: float
    is_held: bool = False
    runs: list[Run] = field(default_factory=list)

    def jobs(self, **options: str | float) -> Jobs:
        """Jobs as asked for on the command line."""
        return Jobs.of(self.source, self.recordings, **{"rows": self.rows, "floor": self.floor, **options})

    @asynccontextmanager
    async def serving(self, method: str, misjudged: float = 1.0, *, watched: bool = False) -> AsyncIterator[Serving]:
        """Serve the pipeline by a method; `watched`: with the adapter."""
        setting = Setting(self.folder / f"{method}-{misjudged}", self.source, method, self.cores, misjudged)
        async with serving(setting, self.profiles, watched=watched) as served:
            self.is_held = served.is_held
            yield served

    def draw(self) -> None:
        """Draw the rows that all jobs are made of, before anything is served."""
        DigitsAvPayloads(0, JobOptions.parse(self.jobs().options))

    def tell(self, run: Run) -> None:
        """Keep a run for the table."""
        self.runs.append(run)

    def taken(self) -> list[Run]:
        """The runs since the last time."""
        runs, self.runs = self.runs, []
        return runs

    def first_rps(self, points: Mapping[str, float]) -> float:
        """Jobs a second that a mix of points should carry by the profile, whatever it then really is."""
        seconds = 0.0
        for name, share in points.items():
            found = self.profiles[STAGE].spec.point(VARIANT, name, 1.0)
            if found is None:
                raise RuntimeError(f"point {name} was not measured")
            seconds += share / max(one.throughput_rps for one in found.measurements)
        return self.cores / seconds / self.jobs().mean_rows

    async def carried(self, method: str) -> float:
        """Jobs a second that a method carries: what an earlier phase found, else searched for."""
        known_rps = self.known.get(method)
        return (await self.search(method)).jobs_rps if known_rps is None else known_rps

    async def search(self, method: str, floor: float | None = None) -> Run:
        """Find the most a method carries, and remember it; where another floor is asked for, only find it."""
        async with self.serving(method) as served:
            jobs = self.jobs() if floor is None else self.jobs(floor=floor)

            async def offer(jobs_rps: float) -> Run:
                run = await served.offer(jobs, jobs_rps, self.seconds)
                self.tell(run)
                return run

            run = await most_carried(offer, self.first_rps(FIRST[method]))
        if floor is None:
            self.known.keep(method, run.jobs_rps)
        return run


EQUAL = f"{OURS}, as accurate as {ONCE}"
FIRST: Mapping[str, Mapping[str, float]] = {
    NONE: {"all": 1.1},
    ONCE: {"audio-text": 1.1, "all": 0.33},
    OURS: {"audio-text": 1.2, "all": 0.15},
}
"""Where searches begin: the share of rows at each point, roughly."""


async def carried(bench: Bench) -> Found:
    """The most each method carries with one violation in a hundred.

    A mix without second looks is more accurate than it was asked to be, since few rows at another point are a batch of
    their own. So ours is asked for more, too, until both are about as accurate.
    """
    runs = {method: await bench.search(method) for method in (NONE, ONCE, OURS)}
    runs[EQUAL] = await _as_accurate(bench, runs[OURS], runs[ONCE].accuracy(POOL)[0])
    figures: dict[str, float | int | str | None] = {}
    for method, run in runs.items():
        accuracy, low, high = run.accuracy(POOL)
        figures |= {
            f"{method}: jobs/s": run.jobs_rps,
            f"{method}: rows/s without violation": run.answered_rows_rps,
            f"{method}: accuracy": accuracy,
            f"{method}: accuracy, 95 %": f"{low:.4f}–{high:.4f}",
            f"{method}: jobs": run.jobs,
        }
    ours, equal, once, none = (runs[method].answered_rows_rps for method in (OURS, EQUAL, ONCE, NONE))
    closeness = runs[EQUAL].accuracy(POOL)[0] - runs[ONCE].accuracy(POOL)[0]
    bars = [
        threshold(
            "throughput at one violation in a hundred: ours over all senses for everybody", ours / none, ">=", 3.0
        ),
        threshold("the same: ours, as accurate, over the best mix without a second look", equal / once, ">=", 1.5),
        threshold("and how much more accurate than that mix these answers are", closeness, ">=", -POINT),
    ]
    return Found(figures, bars)


async def _as_accurate(bench: Bench, at_floor: Run, accuracy: float) -> Run:
    """The most ours carries where it is about so accurate: asked for just that first, then for what lies between."""
    more = await bench.search(OURS, floor=round(accuracy, 3))
    low, high = (run.accuracy(POOL)[0] for run in (at_floor, more))
    if abs(high - accuracy) <= POINT or high <= low:
        return more
    share = (accuracy - low) / (high - low)
    return await bench.search(OURS, floor=round(bench.floor + share * (accuracy - bench.floor), 3))


async def quarter(bench: Bench) -> Found:
    """Where all senses for everybody violates one job in four."""
    carried_rps = await bench.carried(NONE)  # found by an instance of its own, in the same folder
    async with bench.serving(NONE) as served:
        hard = await violating(served, bench.jobs(), 0.25, carried_rps, bench.seconds, bench.tell)
        rate_rps = hard.jobs_rps
        seconds = LEAST_JOBS / rate_rps * 1.05
        none = await served.offer(bench.jobs(), rate_rps, seconds, seed=2)
        bench.tell(none)
    async with bench.serving(OURS) as served:
        even = await served.offer(bench.jobs(), rate_rps, seconds, seed=2)
        skewed = await served.offer(bench.jobs(skew=5), rate_rps, seconds, seed=2)
    for run in (even, skewed):
        bench.tell(run)
    bars = [threshold("jobs of the paired runs", min(none.jobs, even.jobs, skewed.jobs), ">=", LEAST_JOBS)]
    bars += [threshold("violations of all senses for everybody", none.violations, ">=", 0.2)]
    for name, run in (("even", even), ("5 : 1", skewed)):
        low = run.accuracy(POOL)[1]
        bars += [
            threshold(
                f"classes {name}: violations of ours, floors in expectation among them", run.violations, "<=", 0.01
            ),
            threshold(f"classes {name}: measured accuracy, lower end of 95 %", low, ">=", bench.floor - POINT),
        ]
    return Found(
        {"jobs/s": rate_rps, **_told("all senses", none), **_told("even", even), **_told("skewed", skewed)}, bars
    )


async def twice(bench: Bench) -> Found:
    """At twice what all senses carry."""
    rate_rps = 2.0 * await bench.carried(NONE)
    async with bench.serving(OURS) as served:
        run = await served.offer(bench.jobs(), rate_rps, max(LEAST_JOBS / rate_rps, bench.seconds), seed=3)
    bench.tell(run)
    rows, known, low, high = run.provisional(POOL)
    figures: dict[str, float | int | str | None] = {
        "jobs/s": rate_rps,
        "provisional rows": rows,
        "provisional rows: accuracy": known if rows else None,
        "provisional rows: accuracy, 95 %": f"{low:.4f}–{high:.4f}" if rows else None,
    }
    return Found(figures | _told("ours", run), [threshold("jobs without any answer", run.dropped, "==", 0)])


async def absent(bench: Bench) -> Found:
    """Three jobs in ten lack a sense or two, and ask for no more than what they have gives."""
    rate_rps = 0.8 * await bench.carried(OURS)
    async with bench.serving(OURS) as served:
        whole = await served.offer(bench.jobs(floor=0), rate_rps, bench.seconds, seed=4)
        lacking = await served.offer(bench.jobs(floor=0, missing=0.3), rate_rps, bench.seconds, seed=4)
    for run in (whole, lacking):
        bench.tell(run)
    figures = {"jobs/s": rate_rps, **_told("whole", whole), **_told("lacking", lacking)}
    figures |= {"rows a batch, whole": whole.batch_rows, "rows a batch, lacking": lacking.batch_rows}
    share = lacking.batch_rows / whole.batch_rows
    return Found(
        figures, [threshold("rows a batch with three jobs in ten lacking a sense, over none", share, ">=", 0.9)]
    )


async def wrong(bench: Bench) -> Found:
    """Latencies that are thought to be half as long again, and half as long, as they are."""
    rate_rps = 0.9 * await bench.carried(OURS)
    runs: dict[float, Run] = {}
    for misjudged in (1.0, 1.5, 0.5):
        async with bench.serving(OURS, misjudged) as served:
            runs[misjudged] = await served.offer(bench.jobs(), rate_rps, 2 * bench.seconds, seed=5)
        bench.tell(runs[misjudged])
    figures: dict[str, float | int | str | None] = {"jobs/s": rate_rps}
    for misjudged, run in runs.items():
        figures |= _told(f"× {misjudged:g}", run)
    more = max(run.violations for run in runs.values()) - runs[1.0].violations
    return Found(figures, [threshold("violations that wrong latencies add", more, "<=", 0.02)])


async def simulated(bench: Bench) -> Found:
    """The first phase and the wrong latencies in simulated time, beside the most that full batches could carry."""
    rows = JobOptions.parse(bench.jobs().options).rows
    asked = Asked(rows, bench.floor, SIMULATED_SECONDS)
    figures: dict[str, float | int | str | None] = {}
    carried: dict[str, float] = {}
    for method in (NONE, ONCE, OURS):
        setting = Setting(bench.folder / f"{method}-simulated", bench.source, method, bench.cores)
        simulating = Simulating(setting, setting.write(), bench.profiles)
        runs = [simulating.carried(replace(asked, seed=seed)) for seed in (1, 2)]
        carried[method] = sum(run.jobs_rps for run in runs) / len(runs)
        figures |= {
            f"{method}: jobs/s": carried[method],
            f"{method}: jobs/s, full batches": simulating.most_rps(asked),
            f"{method}: expected accuracy": sum(run.accuracy for run in runs) / len(runs),
        }
    violations = {}
    for misjudged in (1.0, 1.5, 0.5):
        setting = Setting(bench.folder / f"simulated-{misjudged}", bench.source, OURS, bench.cores, misjudged)
        run = Simulating(setting, setting.write(), bench.profiles).offer(asked, 0.8 * carried[OURS])
        violations[misjudged] = run.violations
        figures[f"× {misjudged:g}: violations"] = run.violations
    more = max(violations.values()) - violations[1.0]
    bars = [
        threshold("simulated throughput: ours over all senses for everybody", carried[OURS] / carried[NONE], ">=", 3.0),
        threshold("the same: ours over the best mix without a second look", carried[OURS] / carried[ONCE], ">=", 1.5),
        threshold("simulated violations that wrong latencies add", more, "<=", 0.02),
    ]
    return Found(figures, bars)


async def deaf(bench: Bench) -> Found:
    """A microphone that fails silently at 20 jobs a second, of one row each."""
    async with bench.serving(OURS, watched=True) as served:
        noticing = asyncio.ensure_future(_noticed(served, BROKEN_SECONDS))
        jobs = bench.jobs(rows="1", muted_microphone=int(BROKEN_SECONDS * DEAF_RPS), floor=0)
        run = await served.load(jobs, DEAF_RPS, BROKEN_SECONDS + AFTER_SECONDS, seed=6)
        plan = served.local.plan
        noticed_seconds = await noticing
    bench.tell(run)
    told = run.results.answered
    late = told[told["scheduled"] > BROKEN_SECONDS + AFTER_SECONDS - SETTLED_SECONDS]
    early = told[told["scheduled"] < BROKEN_SECONDS]
    truth, before = (float(part["correct"].sum() / part["total"].sum()) for part in (late, early))
    expected = float("nan") if plan is None or plan.spec.expected is None else plan.spec.expected.accuracy
    figures: dict[str, float | int | str | None] = {
        "accuracy before": before,
        "accuracy in the end": truth,
        "jobs in the end": len(late),
        "planned accuracy in the end": expected,
        "noticed after, seconds": noticed_seconds,
    }
    bars = [
        threshold("seconds until a microphone that fails silently is noticed", noticed_seconds, "<=", 60.0),
        threshold("planned accuracy off the truth after it", abs(expected - truth), "<=", 2 * POINT),
    ]
    return Found(figures, bars)


async def _noticed(served: Serving, broken_seconds: float) -> float:
    """Seconds from when it broke until the router tells of a drift; more than there were if it never does."""
    loop = asyncio.get_running_loop()
    broke = loop.time() + broken_seconds
    while loop.time() < broke + AFTER_SECONDS:
        state = await served.local.client.state()
        if any(stage.drifted_accuracies for stage in state.stages.values()):
            return loop.time() - broke
        await asyncio.sleep(0.5)
    return 2 * AFTER_SECONDS


def _told(name: str, run: Run) -> dict[str, float | int | str | None]:
    accuracy, low, high = run.accuracy(POOL)
    return {
        f"{name}: jobs": run.jobs,
        f"{name}: violations": run.violations,
        f"{name}: not in time": run.late,
        f"{name}: without any answer": run.dropped,
        f"{name}: measured accuracy": accuracy,
        f"{name}: measured accuracy, 95 %": f"{low:.4f}–{high:.4f}",
        f"{name}: expected accuracy": run.expected,
    }
