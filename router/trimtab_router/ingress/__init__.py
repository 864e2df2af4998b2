"""Ingress of requests over REST, OpenAI's API and gRPC, each in its own form, and of administrative calls."""

from typing import Any

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import RequestInput, TensorSpec
from trimtab_protocol import Parameters
from trimtab_protocol.extensions import OPTIONAL, point_parameters
from trimtab_router.admission.request_parsing import VERSION

SERVER_NAME = "trimtab"
SERVER_VERSION = "2"
PLATFORM = "trimtab_pipeline"
EXTENSIONS = ("binary_tensor_data",)


def model_metadata(pipeline: InferencePipeline) -> dict[str, Any]:
    """A pipeline as a model of the V2 protocol, with optional inputs and points. The first dimension, rows, is free."""
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
    parameters: dict[str, bool | str | int | float] = {}
    for stage in spec.stages:
        for variant in stage.variants:
            for point in variant.operating_points:
                keys = point_parameters(stage.name, variant.name, point.name)
                parameters[keys.modalities] = ",".join(_point_inputs(stage, point))
                parameters[keys.accuracy] = point.measured_accuracy().value
                if point.measured_accuracy().source == "Agreement":  # else it would be mistaken for measured accuracy
                    parameters[keys.accuracy_source] = point.measured_accuracy().source_label
    return parameters


def _point_inputs(stage: Stage, point: OperatingPoint) -> list[str]:
    """Inputs of an operating point, in the stage's order: request tensors by name, others by source."""
    sources = [tensor.source for tensor in stage.inputs if not point.modalities or tensor.name in point.modalities]
    references = [(*split_reference(source), source) for source in sources]
    return [tensor if owner == REQUEST else source for owner, tensor, source in references]
