"""Replicas that encode images give way to those that write, in real processes."""

from pathlib import Path

import psutil

from tests.builders import a_plan
from trimtab.local.fleet import ENCODERS_NICENESS
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import load_pipeline

PARTED = Path(__file__).parents[2] / "pipelines" / "lmm-digits" / "parted.yaml"


async def test_who_encodes_gives_way_to_who_writes(tmp_path: Path) -> None:
    plan = a_plan(load_pipeline(PARTED), 1, variant="decoder-only", replicas=1, cores="500m", accuracy=0.9)

    async with Supervisor(Setup(PARTED, tmp_path / "run", profiles_file=None, plan=plan)) as local:
        await local.ready()
        found = {name.split("-")[0]: psutil.Process(pid).nice() for name, pid in local.fleet.pids.items()}

    assert found == {"encode": ENCODERS_NICENESS, "answer": 0}
