"""Model at all candidate points, in this process."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch

from trimtab.tuning.candidates import Gpu
from trimtab_loadtester.payloads.interface import Payload
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Network
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.server.torch_model import move_to_device, to_torch
from trimtab_model_servers.transformer.compiled import SUFFIX
from trimtab_model_servers.weights.loading import CPU
from trimtab_pipelines.graph import split_reference
from trimtab_pipelines.model_spec import ModelSpec, model_spec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

Inputs = Mapping[str, torch.Tensor]


class CandidateModel:
    """The model of a tuning target, loaded once with all candidate points."""

    def __init__(self, pipeline: InferencePipeline, folder: Path, points: Sequence[OperatingPoint]) -> None:
        """Load the model of a pipeline of one stage with one variant, onto the device that the variant requests.

        The points to try begin with the full model; `folder` is the base of relative storage URIs. Raises ValueError if
        the model cannot be loaded, or cannot run at a point.
        """
        self._stage = pipeline.spec.stages[0]
        self._variant = self._stage.variants[0]
        served = model_spec(pipeline, folder, self._stage, self._variant, self._variant.resources.cpu)
        self._spec = served.replace(operating_points=tuple(points))
        torch.set_num_threads(self._spec.threads)
        try:
            self._network: Network = build(self._spec).network
            self._device = move_to_device(self._spec, self._network)
        except ModelError as error:
            raise ValueError(str(error)) from error
        self.points = points
        self._outputs = {output.name: split_reference(output.source)[1] for output in pipeline.spec.outputs}
        self._inputs = {read.name: split_reference(read.source) for read in self._stage.inputs}

    @property
    def layers(self) -> tuple[int, int]:
        """Number of patches of an image, and of layers; raises ValueError if the model is no vision transformer."""
        shape = self._transformer.transformer.shape
        return shape.patches, shape.depth

    @property
    def _transformer(self) -> ServedTransformer:
        if not isinstance(self._network, ServedTransformer):
            raise ValueError(f"variant {self._variant.name}: family {self._variant.family!r} does not merge tokens")
        return self._network

    @property
    def folder(self) -> Path | None:
        """Folder of the weights; None if they are not a local file."""
        parts = urlsplit(self._spec.storage_uri)
        if parts.scheme not in {"", "file"}:
            return None
        return Path(unquote(parts.path) if parts.scheme else self._spec.storage_uri).parent

    def spec_at(self, point: OperatingPoint) -> ModelSpec:
        return self._spec.replace(operating_points=(point,))

    def add_point(self, point: OperatingPoint, like: str, folder: Path) -> None:
        """Add a point that is the compiled form of the point `like`; raises ModelError if it cannot be used."""
        self._transformer.add_compiled_point(point, like, folder)

    def install_compiled(self, points: Sequence[OperatingPoint], work_folder: Path) -> None:
        """Copy the compiled forms of points next to the weights, each atomically."""
        for point in points:
            if point.compiled is not None and self.folder is not None:
                target = self.folder / f"{point.compiled}{SUFFIX}"
                partial = target.with_suffix(".part")
                shutil.copyfile(work_folder / target.name, partial)
                partial.replace(target)

    @property
    def gpu(self) -> Gpu:
        """Location of the GPU that the variant requests."""
        if not self._variant.resources.gpu:
            return "None"
        return "Elsewhere" if self._device == CPU else "Here"

    def rows(self, payloads: Sequence[Payload]) -> Inputs:
        payload_inputs = [{tensor.name: tensor for tensor in payload.inputs} for payload in payloads]
        return {
            name: torch.cat([to_torch(tensors[source].array) for tensors in payload_inputs])
            for name, (_, source) in self._inputs.items()
            if source in payload_inputs[0]
        }

    def run(self, inputs: Inputs, point: OperatingPoint) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Compute a batch; return the pipeline's outputs, and the confidences if the stage outputs them."""
        outputs, confidence = self._compute(inputs, point), self._stage.confidence
        confidences = None if confidence is None else outputs[confidence].cpu()
        return {name: outputs[source].cpu() for name, source in self._outputs.items()}, confidences

    def labels(self, inputs: Inputs, point: OperatingPoint) -> torch.Tensor:
        return self._compute(inputs, point)["label"].cpu()

    def _compute(self, inputs: Inputs, point: OperatingPoint) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return self._network.infer({name: rows.to(self._device) for name, rows in inputs.items()}, point)
