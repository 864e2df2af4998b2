"""A pipeline whose plan chooses between reading images whole and apart, and plans that chose."""

from typing import Any

from tests.builders import a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.disaggregated import an_encoder
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

WHOLE, PULLS = "whole", "small"


def a_choosing_writer(**changes: Any) -> dict[str, Any]:
    """Reads images itself or what was made of them; `small` pulls, `whole` does not."""
    read = [
        {"name": name, "from": f"request.inputs.{name}", "optional": name != "messages"}
        for name in ("messages", "options", "images")
    ]
    read.append({"name": "references", "from": "encode.outputs.references", "optional": True})
    return a_writer(*read, variants=[a_variant(PULLS), a_variant(WHOLE, encoder="Colocated")], **changes)


def a_choosing_pipeline(**changes: Any) -> InferencePipeline:
    """An encoder, and a writer whose plan chooses."""
    return a_chat_pipeline([an_encoder(), a_choosing_writer()], **changes)


def laid_out(pipeline: InferencePipeline, *, apart: bool, generation: int = 1) -> PipelinePlan:
    """A plan of one layout."""
    stages = [
        {"name": "encode", "variant": "small", "batchSize": 8, "replicas": int(apart), "accuracy": 1.0},
        {"name": "text", "variant": PULLS if apart else WHOLE, "batchSize": 8, "replicas": 1, "accuracy": 0.9},
    ]
    spec = {"pipeline": pipeline.name, "generation": generation, "createdAt": 0.0, "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})
