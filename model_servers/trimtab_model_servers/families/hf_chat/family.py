"""Pretrained chat models: decoders of text, LLaVA-OneVision, InternVL, SmolVLM and Llama 3.2 Vision.

`hf/text-generation` and `hf/image-text-to-text` take their architecture from a folder's config.json; the others name a
published model. Models with random weights are for planning and trials: they have the published layers, widths and
image tokens, and a byte tokenizer. Stored models are a folder as transformers writes it, local, in an object store or
on the Hugging Face Hub: config.json, tokenizer.json, and safetensors in any number of files. The folder's chat template
and image settings are used if it has them, else those that the publisher documents; a decoder of text needs a template.
Clusters with a dedicated LLM engine (vLLM, SGLang) should use that instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from pydantic import Field
from torch import Tensor

from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_model_servers.chat.interfaces import ChatComponents, ChatParameters, EmbeddingShape
from trimtab_model_servers.engine.model_adapters import ModelAdapter, adapt_model
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_chat.chat_tokenizer import HfChatTokenizer
from trimtab_model_servers.families.hf_chat.configs import CONFIGS, Size, VlmConfig, find_config
from trimtab_model_servers.families.hf_chat.image_processor import ImageProcessorConfig, read_image_processor
from trimtab_model_servers.families.hf_chat.parts import (
    Device,
    Placement,
    Precision,
    load_part,
    load_text_model,
)
from trimtab_model_servers.families.interfaces import read_parameters
from trimtab_model_servers.weights.files import TOKENIZER_FILE
from trimtab_model_servers.weights.source import RandomSeed, find_folder, find_weights
from trimtab_pipelines.image_tokens import ImageTokens
from trimtab_pipelines.model_spec import ModelSpec

TEXT_GENERATION, IMAGE_TEXT_TO_TEXT = "hf/text-generation", "hf/image-text-to-text"
_FOLDERS = f"a folder, s3://BUCKET/PREFIX or hf://OWNER/NAME with config.json, safetensors and {TOKENIZER_FILE}"


class HfTextParameters(ChatParameters):
    """Settings of decoders of text."""

    dtype: Precision = Field(default="float32", description="Of weights and computation; embeddings are FP32")
    device: Device | None = Field(
        default=None,
        description="`cpu`, `cuda`, or `auto`: a GPU if torch finds one. Default with resources.gpu `auto`, else `cpu`",
    )


class HfVlmParameters(HfTextParameters):
    """Settings of multimodal models."""

    size: Size = Field(default="published", description="`tiny` has the same parts, each very small")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Output of the image processor for one image."""

    inputs: Mapping[str, Tensor]
    alone: bool


class HfVisionEncoder:
    """Encodes images one by one: the tiles of one fill a batch."""

    pixel_bytes = 14
    """The image in four bytes, and its copies in the image processor, as measured."""

    def __init__(self, config: VlmConfig, model: Any, name: str, stored: ImageProcessorConfig | None = None) -> None:
        self.token_rule, self.name = config.token_rule, name
        self.width = int(model.config.text_config.hidden_size)
        self._config, self._model = config, model
        self._processor = config.image_processing.processor(stored)

    def embedding_shape(self, count: ImageTokens) -> EmbeddingShape:
        """The image's tokens, or with cross-attention those of all tiles, with padding."""
        padded_rows = self._config.padded_rows
        if padded_rows is None:
            return EmbeddingShape(count.placeholders, columns=count.columns if self._config.marks_tiles else 0)
        return EmbeddingShape(padded_rows, padded_rows - count.encoded)

    def preprocess(self, file: bytes, images: int) -> ProcessedImage:
        alone = images == 1
        pictures = [decode_image(file, "RGB")]
        drop_dummy = self._config.tiles_single_image_only and not alone
        if drop_dummy:
            pictures.append(Pillow.new("RGB", (1, 1)))  # a second image keeps the processor from splitting the first
        output = self._processor(images=[pictures], return_tensors="pt")
        inputs = {name: tensor for name, tensor in output.items() if isinstance(tensor, Tensor)}
        return ProcessedImage({name: tensor[:1] for name, tensor in inputs.items()} if drop_dummy else inputs, alone)

    def encode(self, pixels: Sequence[ProcessedImage]) -> list[Tensor]:
        """Encode images, [rows, width] each, FP32 in main memory."""
        return [self._encode(image).float().cpu() for image in pixels]

    def _encode(self, image: ProcessedImage) -> Tensor:
        like = next(self._model.parameters())
        inputs = {
            name: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
            for name, tensor in image.inputs.items()
        }
        return self._config.encode(self._model, inputs, image.alone)


def build(spec: ModelSpec) -> ChatComponents:
    """Build the parts named by the family's suffix: the encoder, the generator, or both, as without a suffix."""
    if spec.family == TEXT_GENERATION:
        return _build_text(spec)
    parameters = read_parameters(HfVlmParameters, spec)
    folder = find_folder(spec.storage_uri, spec.digest)
    config, role = _config_and_role(spec, parameters.size, folder)
    weights, placement = folder or _seed(spec), _placement(spec, parameters)
    language = load_part(config, "language", weights, placement) if role in {"colocated", "text"} else None
    vision = load_part(config, "vision", weights, placement) if role in {"colocated", "encode"} else None
    stored = None if folder is None or vision is None else read_image_processor(folder)
    tokenizer = None if language is None else HfChatTokenizer(config, language, folder)
    encoder_name = f"{spec.family}:{spec.storage_uri}:{placement.dtype}"
    return ChatComponents(
        "random" if folder is None else "stored",
        parameters,
        tokenizer,
        None if language is None else _adapt(language, spec),
        None if vision is None else HfVisionEncoder(config, vision, encoder_name, stored),
        _facts(placement)
        | ({} if tokenizer is None else {"template": tokenizer.template_source})
        | ({} if vision is None else {"images": "family" if stored is None else "stored"}),
    )


def _build_text(spec: ModelSpec) -> ChatComponents:
    parameters = read_parameters(HfTextParameters, spec)
    folder, placement = _folder(spec), _placement(spec, parameters)
    model = load_text_model(folder, placement)
    tokenizer = HfChatTokenizer(None, model, folder)
    return ChatComponents("stored", parameters, tokenizer, _adapt(model, spec), None, _facts(placement))


def _config_and_role(spec: ModelSpec, size: Size, folder: Path | None) -> tuple[VlmConfig, str]:
    if spec.family.startswith(IMAGE_TEXT_TO_TEXT):
        return find_config(folder or _folder(spec)), spec.family.removeprefix(IMAGE_TEXT_TO_TEXT)[1:] or "colocated"
    name, _, role = spec.family.partition("/")
    return CONFIGS[name](size), role


def _placement(spec: ModelSpec, parameters: HfTextParameters) -> Placement:
    return Placement(parameters.dtype, parameters.device or ("auto" if spec.gpus else "cpu"))


def _facts(placement: Placement) -> dict[str, bool | int | float | str]:
    return {"dtype": placement.dtype, "device": placement.torch_device.type}


def _adapt(model: Any, spec: ModelSpec) -> ModelAdapter:
    try:
        return adapt_model(model)
    except ValueError as error:
        raise ModelError(f"{spec.storage_uri}: {error}") from error


def _folder(spec: ModelSpec) -> Path:
    folder = find_folder(spec.storage_uri, spec.digest)
    if folder is None:
        raise ModelError(f"family {spec.family!r} has the weights of {_FOLDERS}; {spec.storage_uri} is none of them")
    return folder


def _seed(spec: ModelSpec) -> RandomSeed:
    weights = find_weights(spec.storage_uri, spec.digest)
    if not isinstance(weights, RandomSeed):
        raise ModelError(
            f"family {spec.family!r} has random weights (storageUri random://?seed=1) or those of {_FOLDERS}; "
            f"{spec.storage_uri} is none of them"
        )
    return weights
