"""Tuning target: a pipeline of the one stage and variant whose points are searched."""

from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin, PipelineOutput, Stage, StageInput
from trimtab_pipelines.tensors import RequestInput
from trimtab_pipelines.variants import Variant


def tuning_target(pipeline: InferencePipeline, stage_name: str | None, variant_name: str | None) -> InferencePipeline:
    """Reduce a pipeline to one variant of one stage.

    The inputs and outputs of a pipeline of one stage stay. Otherwise the stage's own inputs and outputs become those of
    the pipeline.

    Args:
        pipeline: a pipeline of any number of stages and variants.
        stage_name: may be None if there is one stage.
        variant_name: may be None if the stage has one variant.

    Raises:
        ValueError: there is no such stage or variant, or several and none is named.
    """
    stage = _stage(pipeline, stage_name)
    variant = _variant(stage, variant_name)
    spec = pipeline.spec
    if len(spec.stages) > 1:
        spec = spec.model_copy(update={"inputs": _inputs(pipeline, stage), "outputs": _outputs(stage)})
        stage = stage.model_copy(update={"inputs": tuple(map(_request_input, stage.inputs))})
    single = stage.model_copy(update={"variants": (variant,), "pin": Pin()})
    spec_json = spec.model_copy(update={"stages": (single,)}).model_dump(mode="json", by_alias=True)
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
        {
            "name": stage_input.name,
            "from": f"{REQUEST}.inputs.{stage_input.name}",
            "optional": stage_input.optional,
        }
    )


def _names(items: tuple[Stage, ...] | tuple[Variant, ...]) -> str:
    return ", ".join(item.name for item in items)
