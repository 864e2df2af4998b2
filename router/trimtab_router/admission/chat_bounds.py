"""`ChatBounds`: bounds on messages and images that arrive as tensors; they are those of OpenAI's API."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Self

from trimtab_pipelines.chat_settings import ChatSettings, ImageLimits
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.chat.chat_parser import validate_image_file
from trimtab_protocol.chat.engine_routes import require_allowed_sources
from trimtab_protocol.tensors import TensorLike
from trimtab_router.admission.request_parsing import chat_inputs
from trimtab_router.refusal import invalid
from trimtab_router.request import Call


@dataclass(frozen=True, slots=True)
class ChatBounds:
    """Bounds of one pipeline. `messages` and `images` name the inputs of requests that they apply to."""

    messages: tuple[str, ...]
    images: tuple[str, ...]
    max_message_bytes: int
    limits: ImageLimits
    forwards: bool = False
    """Whether a third-party engine may read the messages, and fetch what they name."""

    @classmethod
    def of(cls, spec: InferencePipelineSpec, max_message_bytes: int) -> Self:
        limits = (spec.chat_settings or ChatSettings()).images
        names = chat_inputs(spec, MESSAGES_INPUT), chat_inputs(spec, IMAGES_INPUT)
        forwards = any(variant.forwards_chats for stage in spec.stages for variant in stage.variants)
        return cls(*names, max_message_bytes, limits, forwards)

    def check_counts(self, inputs: Iterable[TensorLike]) -> None:
        """Raise Refusal for a chat with too many images, whose values are still unread."""
        for tensor in inputs:
            count = prod(tensor.shape[1:]) if tensor.name in self.images else 0
            if count > self.limits.max_per_request:
                raise invalid(
                    f"input {tensor.name!r} has {count} images in a row; send at most {self.limits.max_per_request}"
                )

    def check(self, call: Call) -> None:
        """Raise Refusal for messages that are too long, InvalidChat for an image that is too large or none."""
        for name in self.messages:
            messages = call.inputs.get(name, ())
            size = max(map(len, messages), default=0)
            if size > self.max_message_bytes:
                raise invalid(f"input {name!r} has {size} bytes in a row; send at most {self.max_message_bytes}")
            for row in messages if self.forwards else ():
                self._check_sources(name, bytes(row))
        for name in self.images:
            if (images := call.inputs.get(name)) is None:
                continue
            for row, files in enumerate(images.reshape(len(images), -1)):
                for number, file in enumerate(files):
                    validate_image_file(bytes(file), f"image {number} in row {row} of input {name!r}", self.limits)

    def _check_sources(self, name: str, messages: bytes) -> None:
        """Raise InvalidChat for messages of which an engine would fetch parts that may not be fetched."""
        try:
            require_allowed_sources(json.loads(messages), name, self.limits)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return  # no request to an engine is made of it
        except RecursionError as error:
            raise invalid(f"input {name!r} has messages that are nested too deep") from error
