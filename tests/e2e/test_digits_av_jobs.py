"""Jobs of digits-av, served by a router and a model server of the test."""

from pathlib import Path

import yaml

from tests.e2e.digits_av_jobs import JOBS, MIN_RIGHT_SHARE, ROWS, TIMES, run_jobs
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.clients import RestClient
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import PipelinePlan

FOLDER = Path(__file__).parents[2] / "pipelines" / "digits-av"
SECONDS_PER_ROW = 0.002


def a_served_copy(folder):
    """digits-av with room for a busy machine, and a plan that allows every operating point."""
    document = yaml.safe_load((FOLDER / "pipeline.yaml").read_text())
    document["spec"]["slo"] = {"latency": "30s"}
    (folder / "weights").symlink_to(FOLDER / "weights")
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document))
    pipeline = load_pipeline(folder / "pipeline.yaml")
    (stage,) = pipeline.spec.stages
    (variant,) = stage.variants
    best, *others = [
        {
            "name": point.name,
            "accuracy": point.accuracy,
            "inputs": point.modalities,
            "serviceSeconds": {rows: SECONDS_PER_ROW * rows * max(len(point.modalities), 1) for rows in (1, ROWS)},
            "escalations": [look.planned("Expected").model_dump(by_alias=True) for look in point.escalations],
        }
        for point in sorted(variant.points, key=lambda point: -point.accuracy)
    ]
    planned = {
        "name": stage.name,
        "variant": variant.name,
        "batchSize": ROWS,
        "replicas": 1,
        "cores": 1.0,
        "operatingPoint": best.pop("name"),
        "fallbacks": others,
        **best,
    }
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": 0, "stages": [planned]}
    return stage, PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


async def test_jobs_use_their_modalities_and_meet_their_floors(tmp_path):
    stage, plan = a_served_copy(tmp_path)
    allowed = [point.name for point in plan.spec.stages[0].points]
    setup = Setup(tmp_path / "pipeline.yaml", tmp_path / "run", plan=plan, proxy=False)
    async with Supervisor(setup) as local:
        await local.ready()
        async with RestClient(f"127.0.0.1:{local.rest_port}", plan.spec.pipeline) as wire:
            met = await run_jobs(wire, stage, allowed)

    assert met.faults == []
    assert met.rows == len(JOBS) * TIMES * ROWS
    assert {"all", "video-text", "audio-text", "text"} <= met.points | {"all"}
    assert met.right / met.rows >= MIN_RIGHT_SHARE
