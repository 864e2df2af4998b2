"""Scheduling priorities of encoder and generation replicas."""

from pathlib import Path

import psutil
import pytest

from tests.builders import a_plan
from tests.time_slices import turn_seconds
from trimtab.local.replica_manager import ENCODER_NICENESS
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.processes.sched_slice import MAX_SLICE_SECONDS

DISAGGREGATED = Path(__file__).parents[2] / "pipelines" / "lmm-digits" / "disaggregated.yaml"


async def test_encoder_replicas_have_a_higher_niceness(tmp_path: Path) -> None:
    plan = a_plan(load_pipeline(DISAGGREGATED), 1, variant="decoder-only", replicas=1, cores="500m", accuracy=0.9)

    async with Supervisor(Setup(DISAGGREGATED, tmp_path / "run", profiles_file=None, plan=plan)) as local:
        await local.ready()
        pids = {name.split("-")[0]: pid for name, pid in local.replica_manager.pids.items()}
        found = {name: psutil.Process(pid).nice() for name, pid in pids.items()}
        turns = {name: turn_seconds(pid) for name, pid in pids.items()}

    own = psutil.Process().nice()
    assert found == {"encode": own + ENCODER_NICENESS, "answer": own}
    assert turns["encode"] == pytest.approx(MAX_SLICE_SECONDS)
    assert turns["answer"] < MAX_SLICE_SECONDS
