"""What one replica serves: the settings of each variant, and the folder MLServer's model repository reads them from.

MLServer's model-settings.json has room for settings of our own (`parameters.extra`); `ModelSpec` is what stands there.
Whoever starts replicas writes the folder, so nothing here needs torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name
from trimtab_pipelines.spec import (
    InferencePipeline,
    InferencePipelineSpec,
    OperatingPoint,
    ParameterValue,
    Stage,
    Variant,
)
from trimtab_pipelines.tensors import StageOutput, TensorSpec

RUNTIME = "trimtab_model_servers.runtime.TorchRuntime"
PLATFORM = "trimtab_pytorch"
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
    inputs: tuple[InputSpec, ...] = Field(min_length=1)
    outputs: tuple[StageOutput, ...] = Field(min_length=1)
    max_batch_size: int = Field(default=64, ge=1)
    operating_points: tuple[OperatingPoint, ...] = Field(min_length=1)
    accuracy: Fraction
    cores: float = Field(default=1.0, gt=0, description="Cores of the whole replica, shared by all models in it")

    @property
    def threads(self) -> int:
        """Threads that compute one batch: the whole cores of the replica, at least one."""
        return max(1, int(self.cores + 1e-9))

    def point(self, name: str) -> OperatingPoint | None:
        """The operating point of that name, None where there is none."""
        return next((point for point in self.operating_points if point.name == name), None)


def write_model_folder(  # noqa: PLR0913, PLR0917  (what, from where, which part, to where, with how much)
    pipeline: InferencePipeline,
    pipeline_folder: Path,
    stage: str,
    variants: Sequence[str],
    folder: Path,
    cores: float,
) -> None:
    """Write what a replica of a stage serves: settings.json and one VARIANT/model-settings.json each.

    Args:
        pipeline: what was asked.
        pipeline_folder: relative storage URIs start here.
        stage: the stage's name.
        variants: which of its variants this replica hosts.
        folder: written to; made when missing.
        cores: cores of this replica.

    Raises:
        KeyError: the pipeline has no such stage or variant.
    """
    owner = pipeline.spec.stage(stage)
    write_models(
        [model_spec(pipeline, pipeline_folder, owner, owner.variant(name), cores) for name in variants], folder
    )


def write_models(specs: Sequence[ModelSpec], folder: Path) -> None:
    """Write settings.json and one NAME/model-settings.json each."""
    for spec in specs:
        _write(folder / spec.name / "model-settings.json", model_settings(spec))
    _write(folder / "settings.json", server_settings())


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
        inputs=tuple(
            InputSpec(name=read.name, datatype=source.datatype, shape=source.shape, optional=read.optional)
            for read in stage.inputs
            for source in [_source(pipeline.spec, read.source)]
        ),
        outputs=stage.outputs,
        max_batch_size=variant.max_batch_size,
        operating_points=variant.points,
        accuracy=variant.accuracy,
        cores=cores,
    )


def most_rows(pipeline: InferencePipelineSpec, stage: Stage) -> int | None:
    """Return how many rows of a stage's inputs one request to a replica of ours can hold; None where any number can."""
    row_bytes = sum(_source(pipeline, read.source).row_bytes for read in stage.inputs)
    return (MAX_BODY_BYTES - HEADER_BYTES) // row_bytes if row_bytes else None


def resolve_uri(storage_uri: str, folder: Path) -> str:
    """Make a relative path absolute; leave every other storage URI as it is."""
    return storage_uri if urlsplit(storage_uri).scheme else str((folder / storage_uri).resolve())


def model_settings(spec: ModelSpec) -> dict[str, object]:
    """What MLServer reads about one model. Its own `max_batch_size` stays 0: that would turn its batcher on."""
    return {
        "name": spec.name,
        "implementation": RUNTIME,
        "platform": PLATFORM,
        "inputs": [_metadata(tensor) for tensor in spec.inputs],
        "outputs": [_metadata(tensor) for tensor in spec.outputs],
        "parameters": {
            "uri": spec.storage_uri,
            "extra": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        },
    }


def server_settings() -> dict[str, object]:
    """What MLServer reads about the process: no worker processes and no metrics port."""
    return {
        "debug": False,
        "server_name": "trimtab",
        "parallel_workers": 0,
        "metrics_endpoint": None,
        "gzip_enabled": False,
        "grpc_max_message_length": MAX_BODY_BYTES + 2**20,
    }


def _source(pipeline: InferencePipelineSpec, reference: str) -> TensorSpec:
    owner, tensor = split_reference(reference)
    declared: Sequence[TensorSpec] = pipeline.inputs if owner == REQUEST else pipeline.stage(owner).outputs
    return next(source for source in declared if source.name == tensor)


def _metadata(tensor: TensorSpec) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}


def _write(path: Path, content: object) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")
