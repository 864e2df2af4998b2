"""A small echo pipeline on disk, and plans for it."""

from pathlib import Path
from typing import Any

import yaml

from tests.builders import a_pipeline, a_pipeline_document, a_plan, a_stage, a_variant
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline


def echo_stages(*, delay_seconds: float = 0.0) -> list[dict[str, Any]]:
    """Two stages that add one each; variant `fast` and variant `slow` differ in accuracy and delay."""
    names, sources = ("first", "second"), ("request.inputs.x", "first.outputs.y")
    return [
        a_stage(
            name,
            source,
            variants=[
                a_variant("fast", accuracy=0.8, resources={"cpu": "500m", "memory": "64Mi"}),
                a_variant(
                    "slow",
                    accuracy=0.9,
                    resources={"cpu": "500m", "memory": "64Mi"},
                    parameters={"delay_seconds": delay_seconds},
                ),
            ],
        )
        for name, source in zip(names, sources, strict=True)
    ]


def write_echo_pipeline(folder: Path, **changes: Any) -> Path:
    """Write the pipeline; return its file."""
    document = a_pipeline_document(echo_stages(), **({"budget": {"cores": "2"}, "slo": {"latency": "2s"}} | changes))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def echo_pipeline() -> InferencePipeline:
    """The same pipeline as a value."""
    return a_pipeline(echo_stages(), budget={"cores": "2"}, slo={"latency": "2s"})


def echo_plan(variant: str = "fast", replicas: int = 1, generation: int = 1) -> PipelinePlan:
    """A plan that runs this variant in both stages."""
    accuracy = {"fast": 0.8, "slow": 0.9}[variant]
    return a_plan(echo_pipeline(), generation, variant=variant, replicas=replicas, cores="500m", accuracy=accuracy)


def write_plan(path: Path, plan: PipelinePlan) -> Path:
    """Write a plan as JSON."""
    write_json(path, plan)
    return path
