"""A load at a pipeline in the cluster, from a process of its own, and how much of it the node can carry."""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.cluster.crowding import free_by_node
from benchmarks.cluster.setting import Setting, console
from trimtab.demo_load import DemoLoad, changing_load
from trimtab.local.load_process import LoadOptions, LoadProcess
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_kubernetes.objects import Object
from trimtab_loadtester.results import Results
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

SPARE_CORES = 0.05
LOADS_RPS = tuple(float(load) for load in np.geomspace(1.0, 500.0, 40))
ABOVE = 1.5
LEAST_RATIO = 8.0
SHARE = 0.5
"""Plans stand on the busiest second to come, and the load's own process and the control plane run on the same cores."""


async def free_cores(setting: Setting) -> float:
    """What the node can still give to pods, those of our namespace not counted."""

    def ours(pod: Object) -> bool:
        return pod["metadata"]["namespace"] == setting.namespace and "router" not in pod["metadata"]["name"]

    return sum((await free_by_node(setting, ours)).values()) - SPARE_CORES


def demand_within(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], cores: float) -> DemoLoad:
    """A range of load in which variants and replicas change where a pipeline has only so many cores.

    Low is what the heaviest variants carry alone. High is where more replicas are planned, and half as much above too.
    """
    budget = pipeline.spec.budget.model_copy(update={"cores": min(pipeline.spec.budget.cores, cores)})
    within = pipeline.model_copy(update={"spec": pipeline.spec.model_copy(update={"budget": budget})})

    def replicas(load_rps: float) -> int:
        forecast = ForecastRecord(peak_rps=load_rps, source="given")
        plan = decide(within, profiles, PlanningInputs(forecast, 0.0)).spec
        return sum(stage.replicas for stage in plan.stages) if plan.feasible else 0

    found = changing_load(within, profiles)
    calm = replicas(found.low_rps)
    high = next((rps for rps in LOADS_RPS if min(replicas(rps), replicas(ABOVE * rps)) > calm), found.high_rps)
    return DemoLoad(min(found.low_rps, high / LEAST_RATIO), max(found.high_rps, high) * SHARE)


async def send(pipeline_file: Path, address: str, order: LoadOptions, begun: asyncio.Event | None = None) -> Results:
    """Send a load and return what became of every request; `begun` is set once the first is sent."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-load-"))
    sending = await LoadProcess.start(pipeline_file, address, order, folder)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("load")
            async for now in sending.progress():
                if begun is not None and now.sent:
                    begun.set()
                counts = " ".join(f"{end.word} {count}" for end, count in now.outcomes.items())
                bar.update(task, description=f"{now.sent}/{now.scheduled} sent: {counts}")
        return await sending.results()
    finally:
        await sending.stop()
        shutil.rmtree(folder, ignore_errors=True)
