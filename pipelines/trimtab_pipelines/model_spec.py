"""What one replica serves: a variant of a stage as a model server hosts it, whoever starts that server. Pure."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, Stage
from trimtab_pipelines.tasks import Task
from trimtab_pipelines.tensors import StageOutput, TensorSpec
from trimtab_pipelines.variants import ParameterValue, Variant

MAX_BODY_BYTES = 64 * 2**20
HEADER_BYTES = 2**16
"""Of a body, what is kept for the words before the tensors."""
CACHE_TENANT_VARIABLE = "TRIMTAB_WEIGHTS_CACHE_TENANT"
"""Set where others use the same weights cache: whose weights this process may share with, a namespace."""


class InputSpec(TensorSpec):
    """A tensor a model reads."""

    optional: bool = Field(default=False, description="A request may leave it out")


class ModelSpec(Model):
    """One variant as a model server hosts it."""

    name: Name
    family: str = Field(min_length=1)
    parameters: dict[str, ParameterValue] = Field(default_factory=dict, description="Settings of the family")
    storage_uri: str = Field(description="Where the weights are; paths are absolute here")
    digest: str | None = None
    tasks: tuple[Task, ...] = Field(default=(), exclude_if=is_empty, description="Beside those of the weights")
    tasks_folder: str = Field(
        default="", exclude_if=is_empty, description="Where more of them come and go while the replica runs"
    )
    inputs: tuple[InputSpec, ...] = Field(min_length=1)
    outputs: tuple[StageOutput, ...] = Field(min_length=1)
    max_batch_size: int = Field(default=64, ge=1)
    operating_points: tuple[OperatingPoint, ...] = Field(min_length=1)
    accuracy: Fraction
    cores: float = Field(default=1.0, gt=0, description="Cores of the whole replica, shared by all models in it")

    gpus: int = Field(default=0, ge=0, exclude_if=lambda gpus: not gpus, description="GPUs that its variant asks for")

    @property
    def threads(self) -> int:
        """Threads that compute one batch: the whole cores of the replica, at least one."""
        return max(1, int(self.cores + 1e-9))

    def point(self, name: str) -> OperatingPoint | None:
        """The operating point of that name, None where there is none."""
        return next((point for point in self.operating_points if point.name == name), None)


def model_spec(
    pipeline: InferencePipeline, pipeline_folder: Path, stage: Stage, variant: Variant, cores: float
) -> ModelSpec:
    """Describe one variant of one stage: its own fields, and the tensors its stage gives and takes."""
    return ModelSpec(
        name=variant.name,
        family=variant.family,
        parameters=variant.parameters,
        storage_uri=resolve_uri(variant.storage_uri, pipeline_folder),
        digest=variant.digest,
        tasks=tuple(
            task
            if task.removed
            else task.model_copy(update={"storage_uri": resolve_uri(task.storage_uri, pipeline_folder)})
            for task in variant.tasks
        ),
        inputs=_inputs(pipeline.spec, stage, stage.excluded_input(variant.name)),
        outputs=stage.outputs,
        max_batch_size=variant.max_batch_size,
        operating_points=tuple(point.without_evidence() for point in variant.points),
        accuracy=variant.accuracy,
        cores=cores,
        gpus=variant.resources.gpu,
    )


def _inputs(spec: InferencePipelineSpec, stage: Stage, left_out: str) -> tuple[InputSpec, ...]:
    """What a replica of a stage reads: one that encodes is told how many images a chat has and which each is."""
    read = tuple(
        InputSpec(name=read.name, datatype=source.datatype, shape=source.shape, optional=read.optional)
        for read in stage.inputs
        if read.name != left_out
        for source in [source_of(spec, read.source)]
    )
    return (
        (*read, InputSpec(name=CHAT_IMAGE_INDEX, datatype="INT64", shape=(2,), optional=True))
        if stage.encodes
        else read
    )


def max_rows(pipeline: InferencePipelineSpec, stage: Stage) -> int | None:
    """How many rows of a stage's inputs one request to a replica of ours can hold; None where any number can."""
    row_bytes = sum(source_of(pipeline, read.source).row_bytes for read in stage.inputs)
    return (MAX_BODY_BYTES - HEADER_BYTES) // row_bytes if row_bytes else None


def resolve_uri(storage_uri: str, folder: Path) -> str:
    """Make a relative path absolute; leave every other storage URI as it is."""
    return storage_uri if urlsplit(storage_uri).scheme else str((folder / storage_uri).resolve())


def source_of(pipeline: InferencePipelineSpec, reference: str) -> TensorSpec:
    """The tensor that a valid reference names, of the request or of a stage."""
    owner, tensor = split_reference(reference)
    declared: Sequence[TensorSpec] = pipeline.inputs if owner == REQUEST else pipeline.stage(owner).outputs
    return next(source for source in declared if source.name == tensor)
