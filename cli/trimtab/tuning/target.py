"""The transformer that points are found for, as a pipeline of its own: one stage with one variant. Pure."""

from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin, PipelineOutput, Stage, StageInput
from trimtab_pipelines.tensors import RequestInput
from trimtab_pipelines.variants import Variant


def tuning_target(pipeline: InferencePipeline, stage_name: str | None, variant_name: str | None) -> InferencePipeline:
    """A variant of a stage as a pipeline.

    Where the pipeline has no other stage, requests and answers stay as they are. Else what the stage reads is what a
    request brings, and what it gives is the answer, by its own names.

    Args:
        pipeline: of any number of stages and variants.
        stage_name: which; None where it has one.
        variant_name: which of the stage's; None where it has one.

    Raises:
        ValueError: there is no such stage or variant, or there are several and none is named.
    """
    stage = _stage(pipeline, stage_name)
    variant = _variant(stage, variant_name)
    spec = pipeline.spec
    if len(spec.stages) > 1:
        spec = spec.model_copy(update={"inputs": _inputs(pipeline, stage), "outputs": _outputs(stage)})
        stage = stage.model_copy(update={"inputs": tuple(_of_request(read) for read in stage.inputs)})
    alone = stage.model_copy(update={"variants": (variant,), "pin": Pin()})
    written = spec.model_copy(update={"stages": (alone,)}).model_dump(mode="json", by_alias=True)
    return InferencePipeline.model_validate({**pipeline.model_dump(mode="json", by_alias=True), "spec": written})


def _stage(pipeline: InferencePipeline, name: str | None) -> Stage:
    stages = pipeline.spec.stages
    if name is None and len(stages) > 1:
        raise ValueError(f"the pipeline has several stages; name one by --stage: {_names(stages)}")
    found = next((stage for stage in stages if name in {None, stage.name}), None)
    if found is None:
        raise ValueError(f"--stage {name}: the pipeline has no such stage; there are: {_names(stages)}")
    return found


def _variant(stage: Stage, name: str | None) -> Variant:
    variants = stage.variants
    if name is None and len(variants) > 1:
        raise ValueError(f"stage {stage.name} has several variants; name one by --variant: {_names(variants)}")
    found = next((variant for variant in variants if name in {None, variant.name}), None)
    if found is None:
        raise ValueError(f"--variant {name}: stage {stage.name} has no such variant; there are: {_names(variants)}")
    return found


def _inputs(pipeline: InferencePipeline, stage: Stage) -> tuple[RequestInput, ...]:
    return tuple(
        RequestInput(name=read.name, datatype=source.datatype, shape=source.shape, optional=read.optional)
        for read in stage.inputs
        for source in [source_of(pipeline.spec, read.source)]
    )


def _outputs(stage: Stage) -> tuple[PipelineOutput, ...]:
    return tuple(
        PipelineOutput.model_validate({"name": output.name, "from": f"{stage.name}.outputs.{output.name}"})
        for output in stage.outputs
    )


def _of_request(read: StageInput) -> StageInput:
    return StageInput.model_validate(
        {"name": read.name, "from": f"{REQUEST}.inputs.{read.name}", "optional": read.optional}
    )


def _names(named: tuple[Stage, ...] | tuple[Variant, ...]) -> str:
    return ", ".join(one.name for one in named)
