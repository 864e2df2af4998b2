"""A minute of load during which a model server is killed every five seconds, and the adapter once."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.figures import Figures
from trimtab.demo_load import changing_load
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.summary_stats import run_stats
from trimtab.run import LocalRun
from trimtab_pipelines.documents import load_profiles

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits"
LOAD_SECONDS = 60.0
LOAD_SHARE = 0.5
"""Of the load that changes the variant of every stage."""
KILL_EVERY_SECONDS = 5.0
WATCH_SECONDS = 0.01
RECOVERY_SECONDS = 30.0


@dataclass(slots=True)
class Kills:
    """Kills of processes, and the seconds until everything was as before."""

    replica_seconds: list[float] = field(default_factory=list)
    adapter_seconds: list[float] = field(default_factory=list)

    async def inject(self, local: Supervisor) -> None:
        """Kill a random replica every five seconds, and the adapter after a third of the time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kill_adapter(local))
            choice, began = random.Random(0), time.monotonic()
            for n in range(1, int(LOAD_SECONDS / KILL_EVERY_SECONDS)):
                await asyncio.sleep(max(began + n * KILL_EVERY_SECONDS - time.monotonic(), 0.0))
                await self._kill_replica(local, choice)

    async def _kill_replica(self, local: Supervisor, choice: random.Random) -> None:
        def is_whole() -> bool:
            return local.replica_manager.settled and local.state is not None and local.state.ready

        await recovery_seconds(is_whole)
        name, pid = choice.choice(sorted(local.replica_manager.pids.items()))
        os.kill(pid, signal.SIGKILL)
        recovered = recovery_seconds(lambda: name not in local.replica_manager.pids and is_whole())
        self.replica_seconds.append(await recovered)

    async def _kill_adapter(self, local: Supervisor) -> None:
        """It has recovered once it has written its next decision."""
        await asyncio.sleep(LOAD_SECONDS / 3)
        assert local.adapter is not None
        size = local.decisions_file.stat().st_size
        os.kill(local.adapter.pid, signal.SIGKILL)
        self.adapter_seconds.append(await recovery_seconds(lambda: local.decisions_file.stat().st_size > size))


async def recovery_seconds(is_recovered: Callable[[], bool]) -> float:
    """Seconds until a condition holds; infinity if it does not hold in time."""
    began = time.monotonic()
    while not is_recovered():
        if time.monotonic() - began > RECOVERY_SECONDS:
            return float("inf")
        await asyncio.sleep(WATCH_SECONDS)
    return time.monotonic() - began


@pytest.mark.endurance
def test_killed_processes_fail_no_request(tmp_path: Path, figures: Figures) -> None:
    document, kills = prepare(PIPELINE), Kills()
    profile_file = choose_profiles(PIPELINE, document, None)
    rate_rps = LOAD_SHARE * changing_load(document, load_profiles(profile_file)).high_rps
    load = LoadOptions(f"constant:{rate_rps:.3g}", duration_seconds=LOAD_SECONDS)
    setup = Setup(PIPELINE, tmp_path / "run", profile_file)

    run = LocalRun("killed processes", setup, load, fault_injector=kills.inject)
    stats = run_stats(asyncio.run(run.run()))

    figures.add(received=stats.received, **stats.outcomes, within_slo_fraction=stats.slo_fraction)
    figures.add(replicas_killed=len(kills.replica_seconds), latency_p99_seconds=stats.p99_seconds)
    figures.require("failed requests", stats.outcomes.get("failed", 0), "==", 0)
    figures.require("requests without an outcome", stats.received - sum(stats.outcomes.values()), "==", 0)
    figures.require("replicas killed", len(kills.replica_seconds), ">=", 3)
    figures.require("longest recovery of a replica, seconds", max(kills.replica_seconds), "<=", RECOVERY_SECONDS)
    figures.require("recovery of the adapter, seconds", max(kills.adapter_seconds), "<=", RECOVERY_SECONDS)
