"""Predicted peak of real replicas, measured by variant alone, against replicas that host them together."""

from dataclasses import replace
from pathlib import Path

import pytest

from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.memory_profile import peak_bytes
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_profiler import inputs
from trimtab_profiler.measure import Effort
from trimtab_profiler.memory import PEAK, read_bytes
from trimtab_profiler.profile import ProfileOptions, profile
from trimtab_profiler.replica import Replica, running_replica

PIPELINES = Path(__file__).parents[2] / "pipelines"
SHORT = ProfileOptions(effort=Effort(0.01, 1, 0.02, rounds=1), batch_sizes=(1, 8, 32))
UNMEASURED = 24
TOLERANCE = 0.1
SLOW = pytest.mark.endurance


async def serve_all_points(pipeline: InferencePipeline, stage: Stage, replica: Replica, names: set[str]) -> None:
    rows = inputs.stage_rows(pipeline, stage, inputs.request_rows(pipeline, 64), 64)
    for variant in (stage.variant(name) for name in sorted(names)):
        for point in variant.points:
            sent = point.batch_inputs(stage.inputs)
            read = {name: array for name, array in rows.items() if sent is None or name in sent}
            size = min(UNMEASURED, variant.max_batch_size)
            batch = inputs.batch(read, size, 0, inputs.datatypes(pipeline, stage))
            await replica.infer(variant.name, point.name, batch)


@pytest.mark.parametrize(
    "name",
    ["digits-av", "vit-tasks", *(pytest.param(name, marks=SLOW) for name in ("digits", "lmm-digits", "self-mm"))],
)
async def test_peak_of_hosted_variants_is_predicted(name: str) -> None:
    folder = PIPELINES / name
    pipeline = load_pipeline(folder / "pipeline.yaml")
    stage = pipeline.spec.ordered_stages[0]
    only = {stage.name: [variant.name for variant in stage.variants]}
    memory = (await profile(pipeline, folder, replace(SHORT, only=only)))[stage.name].spec.memory

    for group in replica_groups(stage):
        hosted = [(memory[each.name], min(UNMEASURED, each.max_batch_size)) for each in group.variants]
        async with running_replica(pipeline, folder, stage.name, sorted(group.names), 1) as replica:
            await serve_all_points(pipeline, stage, replica, set(group.names))
            assert replica.pid is not None
            assert peak_bytes(hosted) == pytest.approx(read_bytes(replica.pid, PEAK), rel=TOLERANCE)
