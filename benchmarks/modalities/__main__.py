"""digits-av served, method by method, on the same jobs. The last line is JSON.

Jobs of several rows ask for an accuracy that no two senses have. Phases, each within six minutes:

- carried: the most each method carries with one violation in a hundred;
- quarter: at the load where all senses for everybody violates one job in four, classes even and 5 : 1 skewed;
- twice: at twice what all senses carry;
- absent: three jobs in ten lack a sense;
- wrong: latencies thought half as long again, and half as long, as they are;
- deaf: a microphone that gives noise alone, with the adapter watching;
- simulated: what each carries and wrong latencies in simulated time, beside the most that full batches could carry.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from benchmarks.loads import KnownLoads, Settings, digest_of
from benchmarks.modalities import phases
from benchmarks.modalities.phases import Bench, Found
from benchmarks.modalities.run import HEADS
from benchmarks.modalities.setting import POOL, SOURCE
from benchmarks.profiles import profiled
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab.plan_view import terminal_table
from trimtab_pipelines.result_line import ResultLine
from trimtab_profiler.profile import PROFILE_FILE
from trimtab_protocol import event_loop

PHASES: Mapping[str, Callable[[Bench], Awaitable[Found]]] = {
    "carried": phases.carried,
    "quarter": phases.quarter,
    "twice": phases.twice,
    "absent": phases.absent,
    "wrong": phases.wrong,
    "deaf": phases.deaf,
    "simulated": phases.simulated,
}


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.modalities", description=__doc__)
    parser.add_argument("--phase", choices=list(PHASES), action="append", help="only this one; repeatable")
    parser.add_argument("--recordings", type=Path, help="folder of real recordings; else synthesised voices")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load in each run of a search")
    parser.add_argument("--cores", type=float, default=0.5, help="that the replica is held to")
    parser.add_argument("--rows", default="8..24", help="of a job")
    parser.add_argument("--floor", type=float, default=0.78, help="accuracy that jobs ask for")
    parser.add_argument("--out", type=Path, default=Path("out/modalities"))
    given = parser.parse_args()
    outcome = event_loop.run(_measured(given))
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


def settings_of(given: argparse.Namespace) -> Settings:
    """What the load that a method carries depends on."""
    return {
        "cores": given.cores,
        "rows": given.rows,
        "floor": given.floor,
        "recordings": str(given.recordings.resolve()) if given.recordings else "synthesised",
        "profile": digest_of(given.out / PROFILE_FILE),
    }


async def _measured(given: argparse.Namespace) -> ResultLine:
    profiles = await profiled(SOURCE, given.out)
    told = Found({}, [])
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        bench = Bench(
            folder=Path(folder),
            source=SOURCE,
            profiles=profiles,
            known=KnownLoads(given.out / "loads.json", settings_of(given)),
            recordings=given.recordings,
            seconds=given.seconds,
            cores=given.cores,
            rows=given.rows,
            floor=given.floor,
        )
        bench.draw()
        for name in given.phase or PHASES:
            found = await PHASES[name](bench)
            told.figures.update({f"{name}: {key}": value for key, value in found.figures.items()})
            told.bars.extend(found.bars)
            if runs := bench.taken():
                console.print(terminal_table(HEADS, [run.line(POOL) for run in runs], name))
    figures = {"recordings": str(given.recordings or "synthesised"), "floor": given.floor, "rows": given.rows}
    figures |= {"replica held to its cores": int(bench.is_held), "cores": given.cores}
    (given.out / "modalities.json").write_text(json.dumps(told.figures, indent=1), encoding="utf-8")
    return ResultLine(name="bench-modalities", figures=figures | told.figures, bars=tuple(told.bars))


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
