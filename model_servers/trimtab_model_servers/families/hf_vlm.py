"""Published multimodal models: LLaVA-OneVision, InternVL, SmolVLM and Llama 3.2 Vision, random by size or stored.

Random weights are for planning and for trying out: layers, widths and image tokens are the published ones, words are
spelled byte by byte. Stored ones are a folder, here, in an object store or on a hub, as transformers writes it:
config.json, safetensors in any number of files, tokenizer.json. A chat is spelled by the template that the folder
holds, and images are prepared as it says; where it says nothing, both are as the family's publisher documents them.
Where a cluster has an engine made for large models (vLLM, SGLang), that is what should answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image as Pillow
from pydantic import Field
from torch import Tensor

from trimtab_model_servers.chat.config import ChatComponents, ChatParameters
from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_model_servers.chat.interfaces import Rows
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_chat_tokenizer import HfChatTokenizer
from trimtab_model_servers.families.hf_image_processor import ImageProcessorConfig, stored_images
from trimtab_model_servers.families.hf_vlm_configs import SHAPES, Size, VlmConfig
from trimtab_model_servers.families.hf_vlm_split import Device, Placement, Precision, half_of
from trimtab_model_servers.families.parameters import read_parameters
from trimtab_model_servers.hf_folder import TOKENIZER_FILE
from trimtab_model_servers.weights_source import RandomSeed, find_folder, find_weights
from trimtab_pipelines.image_tokens import ImageTokens
from trimtab_pipelines.model_spec import ModelSpec


class PublishedParameters(ChatParameters):
    """Settings of the family."""

    size: Size = Field(default="published", description="`tiny` has the same parts, each very small")
    dtype: Precision = Field(default="float32", description="Of weights and sums; embeddings travel in float32")
    device: Device | None = Field(
        default=None,
        description="`auto` is a GPU where torch sees one, `cuda` asks for one; with resources.gpu `auto`, else `cpu`",
    )


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as its processor leaves it, and what else the encoder must know of it."""

    inputs: Mapping[str, Tensor]
    alone: bool


class Encoder:
    """Opens images with the model's own processor, and encodes them one by one: each has tiles enough for a batch."""

    def __init__(self, shape: VlmConfig, model: Any, name: str, stored: ImageProcessorConfig | None = None) -> None:
        self.rule, self.name = shape.rule, name
        self.width = int(model.config.text_config.hidden_size)
        self._shape, self._model = shape, model
        self._processor = shape.images.processor(stored)

    def rows(self, count: ImageTokens) -> Rows:
        """What an image's embeddings have: the tokens it takes, or in a model that attends across every tile's."""
        if self._shape.most_rows is None:
            return Rows(count.placeholders, columns=count.columns if self._shape.tells_tiles else 0)
        return Rows(self._shape.most_rows, self._shape.most_rows - count.encoded)

    def pixels(self, file: bytes, images: int) -> ProcessedImage:
        """Open an image of a chat of ``images``."""
        alone = images == 1
        pictures = [decode_image(file, "RGB")]
        if self._shape.single_image_only and not alone:
            pictures.append(Pillow.new("RGB", (1, 1)))  # one is no longer alone beside another, whatever that shows
        prepared = self._processor(images=[pictures], return_tensors="pt")
        inputs = {name: tensor for name, tensor in prepared.items() if isinstance(tensor, Tensor)}
        return ProcessedImage(
            inputs if alone or not self._shape.single_image_only else {k: t[:1] for k, t in inputs.items()}, alone
        )

    def encode(self, pixels: Sequence[ProcessedImage]) -> list[Tensor]:
        """Encode images, [rows, width] each, FP32 in the processor's memory."""
        return [self._encoded(one).float().cpu() for one in pixels]

    def _encoded(self, image: ProcessedImage) -> Tensor:
        like = next(self._model.parameters())
        inputs = {
            name: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
            for name, tensor in image.inputs.items()
        }
        return self._shape.encode(self._model, inputs, image.alone)


def build(spec: ModelSpec) -> ChatComponents:
    """Build what the family's name ends in: the half that sees, the half that writes, or both."""
    parameters = read_parameters(PublishedParameters, spec)
    name, _, part = spec.family.partition("/")
    shape, folder = SHAPES[name](parameters.size), find_folder(spec.storage_uri, spec.digest)
    device: Device = parameters.device or ("auto" if spec.gpus else "cpu")
    weights, kept = folder or _seed(spec), Placement(parameters.dtype, device)
    writes = half_of(shape, "writes", weights, kept) if part in {"whole", "text"} else None
    sees = half_of(shape, "sees", weights, kept) if part in {"whole", "encode"} else None
    images = None if folder is None or sees is None else stored_images(folder)
    speech = None if writes is None else HfChatTokenizer(shape, writes, folder)
    return ChatComponents(
        "random" if folder is None else "stored",
        parameters,
        speech,
        None if writes is None else adapt_model(writes),
        None if sees is None else Encoder(shape, sees, f"{spec.family}:{spec.storage_uri}:{kept.dtype}", images),
        {"dtype": kept.dtype, "device": kept.place.type}
        | ({} if speech is None else {"template": speech.template})
        | ({} if sees is None else {"images": "family" if images is None else "stored"}),
    )


def _seed(spec: ModelSpec) -> RandomSeed:
    weights = find_weights(spec.storage_uri, spec.digest)
    if not isinstance(weights, RandomSeed):
        raise ModelError(
            f"family {spec.family!r} has random weights (storageUri random://?seed=1) or those of a folder, "
            f"s3://BUCKET/PREFIX or hf://OWNER/NAME with config.json, safetensors and {TOKENIZER_FILE}; "
            f"{spec.storage_uri} is none of them"
        )
    return weights
