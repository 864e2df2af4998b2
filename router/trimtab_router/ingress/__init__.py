"""The front door: protocol on one side, the router on the other, and nothing in between.

Each transport turns what it receives into a `Call` and answers or refusals into what its callers expect.
"""

from typing import Any

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import RequestInput, TensorSpec
from trimtab_protocol import Parameters
from trimtab_protocol.extensions import OPTIONAL, point_parameters
from trimtab_router.admission.validation import VERSION

SERVER_NAME = "trimtab"
SERVER_VERSION = "2"
PLATFORM = "trimtab_pipeline"
EXTENSIONS = ("binary_tensor_data",)


def model_metadata(pipeline: InferencePipeline) -> dict[str, Any]:
    """A pipeline as a model of the protocol; the first dimension, the rows, is free.

    Its parameters tell which inputs a request may leave out, and what every operating point listed reads and how
    accurate it is; a pipeline without such has no parameters.
    """
    spec = pipeline.spec
    outputs = []
    for output in spec.outputs:
        owner, _, name = output.source.split(".", 2)
        tensors: tuple[TensorSpec, ...] = spec.inputs if owner == "request" else spec.stage(owner).outputs
        tensor = next(tensor for tensor in tensors if tensor.name == name)
        outputs.append(_tensor_metadata(output.name, tensor))
    points = _points(spec)
    return {
        "name": pipeline.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor_metadata(tensor.name, tensor) | _optional(tensor) for tensor in spec.inputs],
        "outputs": outputs,
        **({"parameters": points} if points else {}),
    }


def _tensor_metadata(name: str, tensor: TensorSpec) -> dict[str, Any]:
    return {"name": name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}


def _optional(tensor: RequestInput) -> dict[str, Any]:
    return {"parameters": {OPTIONAL: True}} if tensor.optional else {}


def _points(spec: InferencePipelineSpec) -> Parameters:
    """What every operating point listed reads, its stage's inputs by their sources, and how accurate it is."""
    told: dict[str, bool | str | int | float] = {}
    for stage in spec.stages:
        for variant in stage.variants:
            for point in variant.operating_points:
                named = point_parameters(stage.name, variant.name, point.name)
                told[named.modalities] = ",".join(_read(stage, point))
                told[named.accuracy] = point.judged().value
                if point.judged().source == "Agreement":  # or it would be taken for a share of right answers
                    told[named.accuracy_source] = point.judged().source_words
    return told


def _read(stage: Stage, point: OperatingPoint) -> list[str]:
    """What a point reads, in the stage's order: a tensor of the request by its own name, another by its source."""
    read = [given.source for given in stage.inputs if not point.modalities or given.name in point.modalities]
    owners = [(*split_reference(source), source) for source in read]
    return [tensor if owner == REQUEST else source for owner, tensor, source in owners]
