"""`ModelSpec`: a variant of a stage as a model server hosts it."""

from collections.abc import Mapping, Sequence
from itertools import count, takewhile
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
"""Part of a body that is reserved for the JSON header before the tensors."""
MAX_VARIABLE_BYTES = 100_000
CACHE_TENANT_VARIABLE = "TRIMTAB_WEIGHTS_CACHE_TENANT"
"""Environment variable with the namespace whose weights a process may share in a node-wide cache."""


class InputSpec(TensorSpec):
    """A model's input tensor."""

    optional: bool = False
    """A request may omit the input."""


class ModelSpec(Model):
    """A variant as a model server hosts it."""

    name: Name
    family: str = Field(min_length=1)
    parameters: dict[str, ParameterValue] = Field(default_factory=dict)
    """Parameters of the family."""
    storage_uri: str
    """Location of the weights; paths are absolute."""
    digest: str | None = None
    tasks: tuple[Task, ...] = Field(default=(), exclude_if=is_empty)
    """Tasks in addition to those of the weights."""
    tasks_folder: str = Field(default="", exclude_if=is_empty)
    """Folder of tasks that may change while the replica runs."""
    inputs: tuple[InputSpec, ...] = Field(min_length=1)
    outputs: tuple[StageOutput, ...] = Field(min_length=1)
    max_batch_size: int = Field(default=64, ge=1)
    operating_points: tuple[OperatingPoint, ...] = Field(min_length=1)
    accuracy: Fraction
    cores: float = Field(default=1.0, gt=0)
    """Cores of the replica, shared by all its models."""

    gpus: int = Field(default=0, ge=0, exclude_if=is_empty)
    """GPUs that the variant requests."""

    @property
    def threads(self) -> int:
        """Threads that compute one batch: the whole cores of the replica, at least one."""
        return max(1, int(self.cores + 1e-9))

    def point(self, name: str) -> OperatingPoint | None:
        return next((point for point in self.operating_points if point.name == name), None)


def model_spec(
    pipeline: InferencePipeline, pipeline_folder: Path, stage: Stage, variant: Variant, cores: float
) -> ModelSpec:
    """Describe a variant with its stage's input and output tensors."""
    return ModelSpec(
        name=variant.name,
        family=variant.served_family,
        parameters={name: resolve_parameter(value, pipeline_folder) for name, value in variant.parameters.items()},
        storage_uri=resolve_uri(variant.storage_uri, pipeline_folder),
        digest=variant.digest,
        tasks=tuple(
            task if task.removed else task.replace(storage_uri=resolve_uri(task.storage_uri, pipeline_folder))
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


def _inputs(spec: InferencePipelineSpec, stage: Stage, excluded: str) -> tuple[InputSpec, ...]:
    """Inputs of a stage's replicas; an encoder also gets each image's index and the number of images of its chat."""
    read = tuple(
        InputSpec(name=read.name, datatype=source.datatype, shape=source.shape, optional=read.optional)
        for read in stage.inputs
        if read.name != excluded
        for source in [source_of(spec, read.source)]
    )
    return (
        (*read, InputSpec(name=CHAT_IMAGE_INDEX, datatype="INT64", shape=(2,), optional=True))
        if stage.encodes
        else read
    )


def max_rows(pipeline: InferencePipelineSpec, stage: Stage) -> int | None:
    """Maximum rows of a stage's inputs in one request to a model server; None if unbounded."""
    row_bytes = sum(source_of(pipeline, read.source).row_bytes for read in stage.inputs)
    return (MAX_BODY_BYTES - HEADER_BYTES) // row_bytes if row_bytes else None


def split_variable(name: str, value: str) -> dict[str, str]:
    """Environment variables that together hold an ASCII value: NAME, NAME_1, … Linux bounds each to 128 KiB."""
    starts = range(0, max(len(value), 1), MAX_VARIABLE_BYTES)
    return {f"{name}_{n}" if n else name: value[start : start + MAX_VARIABLE_BYTES] for n, start in enumerate(starts)}


def join_variable(name: str, environment: Mapping[str, str]) -> str:
    """The value that `split_variable` split; empty if it is not set."""
    later = takewhile(environment.__contains__, (f"{name}_{n}" for n in count(1)))
    return environment.get(name, "") + "".join(environment[part] for part in later)


def resolve_uri(storage_uri: str, folder: Path) -> str:
    """Make a relative path absolute; other URIs are unchanged."""
    return storage_uri if urlsplit(storage_uri).scheme else str((folder / storage_uri).resolve())


def is_path(value: ParameterValue) -> bool:
    """Whether a parameter is a path relative to the pipeline's file."""
    return isinstance(value, str) and value.startswith(("./", "../"))


def resolve_parameter(value: ParameterValue, folder: Path) -> ParameterValue:
    """Make a relative path absolute; other parameters are unchanged."""
    return str((folder / str(value)).resolve()) if is_path(value) else value


def source_of(pipeline: InferencePipelineSpec, reference: str) -> TensorSpec:
    """The tensor that a valid reference names, of the request or of a stage."""
    owner, tensor = split_reference(reference)
    declared: Sequence[TensorSpec] = pipeline.inputs if owner == REQUEST else pipeline.stage(owner).outputs
    return next(source for source in declared if source.name == tensor)
