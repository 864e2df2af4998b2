"""Under load, kill -9 a model server every five seconds and the adapter once: nothing fails, and all comes back.

`python -m benchmarks.chaos [PIPELINE]` prints how long it took until as many replicas as planned were ready again, and
until the adapter decided again.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.app import run_reporting_errors
from trimtab.commands.demo import accounting
from trimtab.demo_load import changing_load
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.page import write_report
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder
from trimtab.run_record import save
from trimtab.terminal_view import terminal_view
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.result_line import ResultLine, threshold

KILL_EVERY_SECONDS = 5.0
LOAD_SHARE = 0.5
WATCH_SECONDS = 0.01
PATIENCE_SECONDS = 30.0


@dataclass(slots=True)
class Havoc:
    """Kills, and what they led to: seconds until things were as before, one value a kill."""

    duration_seconds: float
    seed: int
    replica_recoveries: list[float] = field(default_factory=list)
    adapter_recoveries: list[float] = field(default_factory=list)

    async def wreak(self, local: Supervisor) -> None:
        """Kill a replica every five seconds, taken at random, and the adapter once, after a third of the time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kill_adapter(local))
            choice, began = random.Random(self.seed), time.monotonic()  # noqa: S311  (which to kill is no secret)
            for n in range(1, int(self.duration_seconds / KILL_EVERY_SECONDS)):
                await asyncio.sleep(max(began + n * KILL_EVERY_SECONDS - time.monotonic(), 0.0))
                self.replica_recoveries.append(await _kill_replica(local, choice))

    async def _kill_adapter(self, local: Supervisor) -> None:
        await asyncio.sleep(self.duration_seconds / 3)
        self.adapter_recoveries.append(await _kill_adapter(local))


async def _kill_replica(local: Supervisor, choice: random.Random) -> float:
    await _wait(lambda: _replicas_back(local, ""))
    name, pid = choice.choice(sorted(local.replica_manager.pids.items()))
    os.kill(pid, signal.SIGKILL)
    return await _wait(lambda: _replicas_back(local, name))


async def _replicas_back(local: Supervisor, dead: str) -> bool:
    """Whether every stage has the replicas its plan asks for, ready, and the router serves."""
    return (
        dead not in local.replica_manager.pids
        and local.replica_manager.settled
        and local.state is not None
        and local.state.ready
    )


async def _kill_adapter(local: Supervisor) -> float:
    """Kill the adapter; return when it has written its next decision."""
    if local.adapter is None:
        raise RuntimeError("there is no adapter to kill: the plan is fixed")
    decided = local.decisions_file.stat().st_size
    os.kill(local.adapter.pid, signal.SIGKILL)

    async def decides() -> bool:
        return local.decisions_file.stat().st_size > decided

    return await _wait(decides)


async def _wait(holds: Callable[[], Awaitable[bool]]) -> float:
    """The seconds until it holds; infinity where it does not within thirty."""
    began = time.monotonic()
    while not await holds():
        if time.monotonic() - began > PATIENCE_SECONDS:
            return float("inf")
        await asyncio.sleep(WATCH_SECONDS)
    return time.monotonic() - began


def chaos_outcome(figures: RunStats, havoc: Havoc) -> ResultLine:
    """Judge a run full of kills."""
    replicas, adapters = havoc.replica_recoveries, havoc.adapter_recoveries
    values: dict[str, float | int | str | None] = {
        "received_requests": figures.received,
        **{f"{name}_requests": count for name, count in figures.outcomes.items()},
        "within_slo_fraction": figures.slo_fraction,
        "latency_p99_seconds": figures.p99_seconds,
        "replicas_killed": len(replicas),
        "replica_recovery_seconds_median": sorted(replicas)[len(replicas) // 2] if replicas else None,
        "replica_recovery_seconds_max": max(replicas, default=None),
        "adapter_recovery_seconds": max(adapters, default=None),
    }
    bars = (
        *accounting(figures),
        threshold("replicas killed", len(replicas), ">=", 3),
        threshold("adapters killed", len(adapters), ">=", 1),
        threshold("longest replica recovery, seconds", max(replicas, default=float("inf")), "<=", PATIENCE_SECONDS),
        threshold("adapter recovery, seconds", max(adapters, default=float("inf")), "<=", PATIENCE_SECONDS),
    )
    return ResultLine(name="chaos", figures=values, bars=bars)


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=__doc__)
    parser.add_argument("pipeline", nargs="?", type=Path, default=Path("pipelines/digits"))
    parser.add_argument("--load", help="default: half of what makes every stage change on this machine")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    return run_reporting_errors(lambda: chaos(given))


def chaos(given: argparse.Namespace) -> int:
    """Serve a load, wreak havoc beside it, print what came of it."""
    document = prepare(given.pipeline)
    profile_file = choose_profiles(given.pipeline, document, None, console)
    demand = changing_load(document, load_profiles(profile_file))
    load = given.load or f"constant:{LOAD_SHARE * demand.high_rps:.3g}"
    havoc = Havoc(given.duration, given.seed)
    with RunFolder() as where:
        order = LoadOptions(load, duration_seconds=given.duration, seed=given.seed)
        setup = Setup(given.pipeline, where, profile_file)
        session = LocalRun(f"{document.name} under fire", setup, order, fault_injector=havoc.wreak)
        with terminal_view(session, console):
            run = asyncio.run(session.run())
    print_summary(run, console)
    save(run, given.out / "chaos")
    write_report(given.out / "chaos.html", [run])
    console.print(f"report: {given.out / 'chaos.html'}")
    outcome = chaos_outcome(run_stats(run), havoc)
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
