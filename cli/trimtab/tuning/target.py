"""Tuning target: the one variant whose points are searched, and the edit that writes them into its pipeline."""

import json
from collections.abc import Sequence

from trimtab.tuning.selection import Trial
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin, PipelineOutput, Stage, StageInput
from trimtab_pipelines.tensors import RequestInput
from trimtab_pipelines.variants import Variant
from trimtab_pipelines.yaml_edit import node_content_end, variant_node, with_accuracies

KNOBS = ("merging", "prompts", "precision", "compiled")


def tuning_target(pipeline: InferencePipeline, stage_name: str | None, variant_name: str | None) -> InferencePipeline:
    """Reduce a pipeline to one variant of one stage; a name may be None if there is only one.

    The inputs and outputs of a pipeline of one stage stay. Otherwise the stage's own inputs and outputs become those of
    the pipeline. Raises ValueError if there is no such stage or variant, or several and none is named.
    """
    stage = _stage(pipeline, stage_name)
    variant = _variant(stage, variant_name)
    spec = pipeline.spec
    if len(spec.stages) > 1:
        spec = spec.replace(inputs=_inputs(pipeline, stage), outputs=_outputs(stage))
        stage = stage.replace(inputs=tuple(map(_request_input, stage.inputs)))
    single = stage.replace(variants=(variant,), pin=Pin())
    spec_json = spec.replace(stages=(single,)).model_dump(mode="json", by_alias=True)
    return InferencePipeline.model_validate({**pipeline.model_dump(mode="json", by_alias=True), "spec": spec_json})


def _stage(pipeline: InferencePipeline, name: str | None) -> Stage:
    stages = pipeline.spec.stages
    if name is None and len(stages) > 1:
        raise ValueError(f"the pipeline has several stages; choose one by --stage: {_names(stages)}")
    match = next((stage for stage in stages if name in {None, stage.name}), None)
    if match is None:
        raise ValueError(f"--stage {name}: no such stage; the pipeline has: {_names(stages)}")
    return match


def _variant(stage: Stage, name: str | None) -> Variant:
    variants = stage.variants
    if name is None and len(variants) > 1:
        raise ValueError(f"stage {stage.name} has several variants; choose one by --variant: {_names(variants)}")
    match = next((variant for variant in variants if name in {None, variant.name}), None)
    if match is None:
        raise ValueError(f"--variant {name}: no such variant; stage {stage.name} has: {_names(variants)}")
    return match


def _inputs(pipeline: InferencePipeline, stage: Stage) -> tuple[RequestInput, ...]:
    return tuple(
        RequestInput(name=stage_input.name, datatype=source.datatype, shape=source.shape, optional=stage_input.optional)
        for stage_input in stage.inputs
        for source in [source_of(pipeline.spec, stage_input.source)]
    )


def _outputs(stage: Stage) -> tuple[PipelineOutput, ...]:
    return tuple(
        PipelineOutput.model_validate({"name": output.name, "from": f"{stage.name}.outputs.{output.name}"})
        for output in stage.outputs
    )


def _request_input(stage_input: StageInput) -> StageInput:
    return StageInput.model_validate(
        {"name": stage_input.name, "from": f"{REQUEST}.inputs.{stage_input.name}", "optional": stage_input.optional}
    )


def _names(items: tuple[Stage, ...] | tuple[Variant, ...]) -> str:
    return ", ".join(item.name for item in items)


def with_points(text: str, stage: str, variant: str, selected: Sequence[Trial]) -> str:
    """Write the selected points and their evidence into a variant; DocumentError if it is written in flow style."""
    node = variant_node(text, stage, variant)
    if node is None or node.flow_style:
        raise DocumentError(f"variant {variant}: points can only be added in block style, one field per line")
    column = node.value[0][0].start_mark.column
    listed = "".join(f"\n{' ' * column}- {_flow(trial)}" for trial in selected)
    block = f"operatingPoints:{listed}"
    old = next((pair for pair in node.value if pair[0].value == "operatingPoints"), None)
    if old is not None:
        start, end = old[0].start_mark.index, node_content_end(old[1])
        text = text[:start] + block + text[end:]
    else:
        end = node_content_end(node.value[-1][1])
        text = text[:end] + f"\n{' ' * column}{block}" + text[end:]
    measured = {(stage, variant, trial.point.name): trial.accuracy for trial in selected}
    return with_accuracies(text, measured, {(stage, variant, trial.point.name): trial.by_task for trial in selected})


def _flow(trial: Trial) -> str:
    written = trial.point.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    knobs = [f"{name}: {json.dumps(written[name])}" for name in KNOBS if name in written]
    return "{" + ", ".join([f"name: {trial.point.name}", *knobs, f"accuracy: {trial.accuracy.value:g}"]) + "}"
