"""The front door: protocol on one side, the router on the other, and nothing in between.

Each transport turns what it receives into a `Call` and answers or refusals into what its callers expect.
"""

from typing import Any

from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_router.admission.checks import VERSION

SERVER_NAME = "trimtab"
SERVER_VERSION = "2"
PLATFORM = "trimtab_pipeline"
EXTENSIONS = ("binary_tensor_data",)


def model_metadata(pipeline: InferencePipeline) -> dict[str, Any]:
    """A pipeline as a model of the protocol; the first dimension, the rows, is free."""
    spec = pipeline.spec
    outputs = []
    for output in spec.outputs:
        owner, _, name = output.source.split(".", 2)
        tensors: tuple[TensorSpec, ...] = spec.inputs if owner == "request" else spec.stage(owner).outputs
        tensor = next(tensor for tensor in tensors if tensor.name == name)
        outputs.append(_tensor_metadata(output.name, tensor))
    return {
        "name": pipeline.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor_metadata(tensor.name, tensor) for tensor in spec.inputs],
        "outputs": outputs,
    }


def _tensor_metadata(name: str, tensor: TensorSpec) -> dict[str, Any]:
    return {"name": name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}
