"""Small pipelines of echoes and of a vision transformer, and plans for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.builders import a_pipeline, a_pipeline_document, a_plan, a_point_profile, a_profile, a_stage, a_variant
from tests.model_servers.transformer.test_family import IMAGE, OUTPUTS
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

TASK_INPUT = {"name": "task", "datatype": "INT64", "shape": []}


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
    document = a_pipeline_document(echo_stages(), **({"budget": {"cores": "2"}, "slo": {"latency": "2s"}} | changes))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def echo_pipeline() -> InferencePipeline:
    return a_pipeline(echo_stages(), budget={"cores": "2"}, slo={"latency": "2s"})


def echo_profiles() -> dict[str, ModelProfile]:
    """Profiles by stage, `slow` four times slower than `fast`."""
    points = [a_point_profile("fast", 0.01, 0.002, cores=0.5), a_point_profile("slow", 0.04, 0.008, cores=0.5)]
    return {stage: a_profile(stage, points) for stage in ("first", "second")}


def echo_plan(variant: str = "fast", replicas: int = 1, generation: int = 1) -> PipelinePlan:
    accuracy = {"fast": 0.8, "slow": 0.9}[variant]
    return a_plan(echo_pipeline(), generation, variant=variant, replicas=replicas, cores="500m", accuracy=accuracy)


def write_plan(path: Path, plan: PipelinePlan) -> Path:
    write_json(path, plan)
    return path


def a_transformer_pipeline(
    inputs: Sequence[dict[str, Any]] = (IMAGE,), slo: str = "1s", **variant: Any
) -> InferencePipeline:
    """One stage `classify` of a vision transformer `vit` that outputs its confidence."""
    vit = a_variant("vit", family="vision-transformer", **({"accuracy": 0.5} | variant))
    stage = a_stage(
        "classify",
        inputs=[{"name": read["name"], "from": f"request.inputs.{read['name']}"} for read in inputs],
        outputs=OUTPUTS,
        confidence="confidence",
        batchSizes=[1, 8],
        variants=[vit],
    )
    outputs = [{"name": "label", "from": "classify.outputs.label"}]
    return a_pipeline([stage], slo={"latency": slo}, inputs=list(inputs), outputs=outputs)
