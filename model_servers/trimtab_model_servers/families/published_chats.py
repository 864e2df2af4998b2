"""Published multimodal models: LLaVA-OneVision, InternVL and Llama 3.2 Vision, random by configuration or stored.

Random weights are for planning and for trying out: layers, widths and image tokens are the published ones, words are
spelled byte by byte. Stored ones are a folder, here, in an object store or on a hub, as transformers writes it:
config.json, safetensors in any number of files, tokenizer.json. A chat is spelled by the family's template, as its
publisher documents it, not by one that a folder may hold. Where a cluster has an engine made for such models (vLLM,
SGLang), that is what should answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image as Pillow
from pydantic import Field
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from trimtab_model_servers.chat.images import opened
from trimtab_model_servers.chat.kit import Place, Prompt, Rows
from trimtab_model_servers.chat.parts import Built, ChatParameters
from trimtab_model_servers.chat.words import Message
from trimtab_model_servers.engine.families import family_of
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.parameters import read_parameters
from trimtab_model_servers.families.published_halves import Device, Kept, Precision, half_of
from trimtab_model_servers.families.published_shapes import SHAPES, Shape, Size, Template
from trimtab_model_servers.folders import TOKENIZER_FILE
from trimtab_model_servers.store import Seed, find_folder, find_weights
from trimtab_pipelines.image_tokens import ImageTokens
from trimtab_pipelines.model_spec import ModelSpec

BYTES: Final = 256
Spell = Callable[[str], Sequence[int]]


class PublishedParameters(ChatParameters):
    """Settings of the family."""

    size: Size = Field(default="published", description="`tiny` has the same parts, each very small")
    dtype: Precision = Field(default="float32", description="Of weights and sums; embeddings travel in float32")
    device: Device | None = Field(
        default=None,
        description="`auto` is a GPU where torch sees one, `cuda` asks for one; with resources.gpu `auto`, else `cpu`",
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """An image as its processor leaves it, and what else the encoder must know of it."""

    inputs: Mapping[str, Tensor]
    alone: bool


class Encoder:
    """Opens images with the model's own processor, and encodes them one by one: each has tiles enough for a batch."""

    def __init__(self, shape: Shape, model: Any, name: str) -> None:
        self.rule, self.name = shape.rule, name
        self.width = int(model.config.text_config.hidden_size)
        self._shape, self._model = shape, model
        self._processor = shape.processor()

    def rows(self, count: ImageTokens) -> Rows:
        """What an image's embeddings have: the tokens it takes, or in a model that attends across every tile's."""
        if self._shape.most_rows is None:
            return Rows(count.placeholders, 0)
        return Rows(self._shape.most_rows, self._shape.most_rows - count.encoded)

    def pixels(self, file: bytes, images: int) -> Opened:
        """Open an image of a chat of ``images``."""
        alone = images == 1
        pictures = [opened(file, "RGB")]
        if self._shape.alone_only and not alone:
            pictures.append(Pillow.new("RGB", (1, 1)))  # one is no longer alone beside another, whatever that shows
        prepared = self._processor(images=[pictures], return_tensors="pt")
        inputs = {name: tensor for name, tensor in prepared.items() if isinstance(tensor, Tensor)}
        return Opened(inputs if alone or not self._shape.alone_only else {k: t[:1] for k, t in inputs.items()}, alone)

    def encode(self, pixels: Sequence[Opened]) -> list[Tensor]:
        """Encode images, [rows, width] each, FP32 in the processor's memory."""
        return [self._encoded(one).float().cpu() for one in pixels]

    def _encoded(self, image: Opened) -> Tensor:
        like = next(self._model.parameters())
        inputs = {
            name: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
            for name, tensor in image.inputs.items()
        }
        return self._shape.encode(self._model, inputs, image.alone)


class Speech:
    """Spells chats in the model's own template: with a tokenizer of its own, or byte by byte."""

    def __init__(self, shape: Shape, model: Any, stored: Path | None = None) -> None:
        text = model.config.text_config
        ends = text.eos_token_id
        self.end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.tokenizer = spelled_out(int(text.vocab_size)) if stored is None else Tokenizer.from_file(str(stored))
        self._words: Spell = bytes_of if stored is None else _spelling(stored, special=False)
        self._marks: Spell = bytes_of if stored is None else _spelling(stored, special=True)
        self._shape = shape

    def prompt(self, messages: Sequence[Message], rows: Sequence[int]) -> Prompt:
        """Spell a chat, each turn's images where its template has them: among its words, or before them."""
        template, left = self._shape.template, iter(rows)
        tokens, places = list(self._marks(template.begin)), list[Place]()
        for message in messages:
            tokens += self._marks(template.opened(message.role))
            for special, said in _in_order(template, message):
                if said is not None:
                    tokens += self._marks(said) if special else self._words(said)
                    continue
                count = next(left)
                places.append(Place(len(tokens), 1 if self._shape.most_rows else count))
                tokens += [self._shape.image_id] * places[-1].placeholders
            tokens += self._marks(template.closing)
        return Prompt((*tokens, *self._marks(template.opened("assistant"))), tuple(places))


def _in_order(template: Template, message: Message) -> Iterator[tuple[bool, str | None]]:
    """What a turn says, in order, and whether special tokens are meant; None is an image's placeholders."""
    parts = message.spoken
    if template.behind_images is not None and message.images:
        parts = (*[None] * message.images, message.text)
    for number, part in enumerate(parts):
        if part is not None:
            if template.behind_images is not None and number:
                yield True, template.behind_images
            yield False, part
        else:
            yield from ((True, template.image[0]), (True, None), (True, template.image[1]))


def bytes_of(text: str) -> Sequence[int]:
    """A text's bytes."""
    return text.encode()


def _spelling(stored: Path, *, special: bool) -> Spell:
    """What spells a text: special tokens as such, or as the words that callers make of them."""
    tokenizer = Tokenizer.from_file(str(stored))
    tokenizer.encode_special_tokens = not special

    def spelled(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return spelled


def spelled_out(vocabulary: int) -> Tokenizer:
    """A tokenizer of bytes; every id above them says its number."""
    alphabet = _byte_letters()
    words = alphabet + [f"<{number}>" for number in range(BYTES, vocabulary)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level BPE, in the bytes' order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def build(spec: ModelSpec) -> Built:
    """Build what the family's name ends in: the half that sees, the half that writes, or both."""
    parameters = read_parameters(PublishedParameters, spec)
    name, _, part = spec.family.partition("/")
    shape, folder = SHAPES[name](parameters.size), find_folder(spec.storage_uri, spec.digest)
    device: Device = parameters.device or ("auto" if spec.gpus else "cpu")
    weights, kept = folder or _seed(spec), Kept(parameters.dtype, device)
    writes = half_of(shape, "writes", weights, kept) if part in {"whole", "text"} else None
    sees = half_of(shape, "sees", weights, kept) if part in {"whole", "encode"} else None
    return Built(
        "random" if folder is None else "stored",
        parameters,
        None if writes is None else Speech(shape, writes, None if folder is None else folder / TOKENIZER_FILE),
        None if writes is None else family_of(writes),
        None if sees is None else Encoder(shape, sees, f"{spec.family}:{spec.storage_uri}:{kept.dtype}"),
        {"dtype": kept.dtype, "device": kept.place.type},
    )


def _seed(spec: ModelSpec) -> Seed:
    weights = find_weights(spec.storage_uri, spec.digest)
    if not isinstance(weights, Seed):
        raise ModelError(
            f"family {spec.family!r} has random weights (storageUri random://?seed=1) or those of a folder, "
            f"s3://BUCKET/PREFIX or hf://OWNER/NAME with config.json, safetensors and {TOKENIZER_FILE}; "
            f"{spec.storage_uri} is none of them"
        )
    return weights
