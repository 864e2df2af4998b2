"""The model of which forms are tried, in this process."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch

from trimtab.tuning.precisions import Gpu
from trimtab_loadtester.payloads.interface import Payload
from trimtab_model_servers.device import placed
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import CPU, Network
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.tensors import to_torch
from trimtab_model_servers.transformer.compiled import SUFFIX
from trimtab_pipelines.graph import split_reference
from trimtab_pipelines.model_spec import ModelSpec, model_spec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

Inputs = Mapping[str, torch.Tensor]


class CandidateModel:
    """The subject of trials, its model in memory once, at as many points as are tried."""

    def __init__(self, pipeline: InferencePipeline, folder: Path, points: Sequence[OperatingPoint]) -> None:
        """Load the model, and bring it to where its variant asks for.

        Args:
            pipeline: of one stage with one variant (`subject_of`).
            folder: where its file is.
            points: that are tried, the model as it is first.

        Raises:
            ValueError: its model cannot be loaded or cannot run at one of the points.
        """
        self._stage = pipeline.spec.stages[0]
        self._variant = self._stage.variants[0]
        served = model_spec(pipeline, folder, self._stage, self._variant, self._variant.resources.cpu)
        self._spec = served.model_copy(update={"operating_points": tuple(points)})
        torch.set_num_threads(self._spec.threads)
        try:
            self._network: Network = build(self._spec).network
            self._device = placed(self._spec, self._network)
        except ModelError as error:
            raise ValueError(str(error)) from error
        self.points = points
        self._outputs = {output.name: split_reference(output.source)[1] for output in pipeline.spec.outputs}
        self._inputs = {read.name: split_reference(read.source) for read in self._stage.inputs}

    @property
    def layers(self) -> tuple[int, int]:
        """Patches of an image, and layers; ValueError where the model is no vision transformer."""
        shape = self._transformer.transformer.shape
        return shape.patches, shape.depth

    @property
    def _transformer(self) -> ServedTransformer:
        if not isinstance(self._network, ServedTransformer):
            raise ValueError(f"variant {self._variant.name}: family {self._variant.family!r} merges no tokens")
        return self._network

    @property
    def folder(self) -> Path | None:
        """The folder that the weights lie in; None where they are no file of this machine."""
        parts = urlsplit(self._spec.storage_uri)
        if parts.scheme not in {"", "file"}:
            return None
        return Path(unquote(parts.path) if parts.scheme else self._spec.storage_uri).parent

    def spec_at(self, point: OperatingPoint) -> ModelSpec:
        """The model at one point alone."""
        return self._spec.model_copy(update={"operating_points": (point,)})

    def join(self, point: OperatingPoint, like: str, folder: Path) -> None:
        """Run a point too that is as another but for its compiled form; ModelError where that cannot be used."""
        self._transformer.join(point, like, folder)

    def install_compiled(self, points: Sequence[OperatingPoint], workshop: Path) -> None:
        """Bring the compiled forms of some points beside the weights; each is there as a whole or not at all."""
        for point in points:
            if point.compiled is not None and self.folder is not None:
                target = self.folder / f"{point.compiled}{SUFFIX}"
                partial = target.with_suffix(".part")
                shutil.copyfile(workshop / target.name, partial)
                partial.replace(target)

    @property
    def gpu(self) -> Gpu:
        """Where the GPU is that the variant asks for."""
        if not self._variant.resources.gpu:
            return "None"
        return "Elsewhere" if self._device == CPU else "Here"

    def rows(self, payloads: Sequence[Payload]) -> Inputs:
        """Stack samples as one batch of the stage's inputs."""
        named = [{tensor.name: tensor for tensor in payload.inputs} for payload in payloads]
        return {
            name: torch.cat([to_torch(given[source]) for given in named])
            for name, (_, source) in self._inputs.items()
            if source in named[0]
        }

    def run(self, inputs: Inputs, point: OperatingPoint) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Compute one batch: outputs by the names that a client sees, and confidences where the stage names its own."""
        found, confidence = self._computed(inputs, point), self._stage.confidence
        told = None if confidence is None else found[confidence].cpu()
        return {name: found[source].cpu() for name, source in self._outputs.items()}, told

    def labels(self, inputs: Inputs, point: OperatingPoint) -> torch.Tensor:
        """The class of each row, whatever of it the pipeline's outputs tell: int64 [B]."""
        return self._computed(inputs, point)["label"].cpu()

    def _computed(self, inputs: Inputs, point: OperatingPoint) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return self._network.infer({name: given.to(self._device) for name, given in inputs.items()}, point)
