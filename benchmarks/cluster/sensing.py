"""Digits-av in the cluster: jobs with and without a sense, through its door."""

from dataclasses import dataclass
from typing import Final

from benchmarks.cluster.jobs import Met, asked
from benchmarks.cluster.observing import served
from benchmarks.cluster.setting import ROOT, CommandError, Setting, pipeline_document
from trimtab_loadtester.clients import RestClient
from trimtab_pipelines.plan import PipelinePlanSpec
from trimtab_pipelines.spec import InferencePipeline

FOLDER: Final = ROOT / "pipelines" / "digits-av"
STAGE_CPU: Final = "500m"
READY_SECONDS: Final = 300.0
PATIENT: Final = {"latency": "30s"}
"""What is looked at is what is answered, not when: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Sensed:
    """What came of it: of the jobs, how many points the plan allowed, and how long it took to serve."""

    met: Met
    planned: int
    ready_seconds: float


async def sensed(setting: Setting) -> Sensed:
    """Serve digits-av on half a core, ask it, and take it away."""
    document = pipeline_document(FOLDER / "pipeline.yaml", setting.namespace)
    (stage,) = document["spec"]["stages"]
    stage["variants"][0]["resources"] |= {"cpu": STAGE_CPU}
    document["spec"] |= {"slo": PATIENT, "budget": {"cores": "1"}}
    name = document["metadata"]["name"]
    async with served(setting, document, READY_SECONDS) as (watched, ready_seconds):
        found = await watched.plan()
        if found is None:
            raise CommandError(f"{name} is ready, but it has no plan")
        planned = [point.name for point in PipelinePlanSpec.model_validate(found["spec"]).stages[0].points]
        spec = InferencePipeline.model_validate(document).spec.stages[0]
        async with RestClient(watched.address, name, setting.credentials.access()) as wire:
            met = await asked(wire, spec, planned)
    return Sensed(met, len(planned), ready_seconds)
