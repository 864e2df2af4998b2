"""Plans on a machine that other processes share: they follow the load, not the machine's drifting speed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.figures import Figures
from trimtab.demo_load import changing_load
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.preflight import choose_profiles
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import FaultInjector, LocalRun
from trimtab_pipelines.documents import load_pipeline, load_profiles
from trimtab_profiler.identity import usable_cores

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(1200)]

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits" / "pipeline.yaml"
PHASE_SECONDS, STEADY_MINUTES, CHANGING_MINUTES = 30.0, 4, 3
STEADY_SHARE = 0.4
"""Steady load as a share of a demonstration's highest load; half of the machine carries it."""
MAX_CHANGES = 12


@contextmanager
def neighbors() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One endless loop for each core, in a session of its own."""
    spin = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(spin, start_new_session=True) for _ in range(os.cpu_count() or 1)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def share_always(_: Supervisor) -> None:
    with neighbors():
        await asyncio.Event().wait()


async def share_every_other_phase(_: Supervisor) -> None:
    with neighbors() as loops:
        while True:
            for action in (signal.SIGSTOP, signal.SIGCONT):
                for loop in loops:
                    loop.send_signal(action)
                await asyncio.sleep(PHASE_SECONDS)


def serve(folder: Path, load: str, minutes: int, neighbor: FaultInjector, profiles: Path) -> RunStats:
    options = LoadOptions(load, duration_seconds=60.0 * minutes)
    run = LocalRun("calm", Setup(PIPELINE, folder, profiles), options, fault_injector=neighbor)
    return run_stats(asyncio.run(run.run()))


def report(stats: RunStats, figures: Figures) -> None:
    figures.add(received=stats.received, p99_seconds=stats.p99_seconds, mean_cores=stats.mean_cores, **stats.outcomes)
    figures.require("failed requests", stats.outcomes["failed"], "==", 0)


def test_steady_load_keeps_its_plan_while_the_speed_drifts(tmp_path: Path, figures: Figures) -> None:
    """No fixed plan has more than all requests within the SLO, so 98 % are within two points of the best."""
    pipeline = load_pipeline(PIPELINE)
    profiles = choose_profiles(PIPELINE, pipeline, None)
    rps = STEADY_SHARE * changing_load(pipeline, load_profiles(profiles), usable_cores()).high_rps

    stats = serve(tmp_path, f"{rps:.3g}", STEADY_MINUTES, share_every_other_phase, profiles)

    report(stats, figures)
    figures.require("changes of the plan", stats.plan_changes, "<=", STEADY_MINUTES)
    figures.require("share within SLO", stats.slo_fraction, ">=", 0.98)


def test_changing_load_beside_busy_neighbors(tmp_path: Path, figures: Figures) -> None:
    pipeline = load_pipeline(PIPELINE)
    profiles = choose_profiles(PIPELINE, pipeline, None)
    load = changing_load(pipeline, load_profiles(profiles), usable_cores()).spec()

    stats = serve(tmp_path, load, CHANGING_MINUTES, share_always, profiles)

    report(stats, figures)
    figures.require("changes of the plan", stats.plan_changes, "<=", MAX_CHANGES)
    figures.require("share within SLO", stats.slo_fraction, ">=", 0.93)
