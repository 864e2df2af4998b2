"""Warm-up of chat models: a first chat allocates buffers and kernels, and fails if the model cannot run."""

import io
import queue

import torch
from PIL import Image as Pillow
from torch import Tensor

from trimtab_model_servers.chat.interfaces import ChatTokenizer, EmbeddingShape, VisionEncoder
from trimtab_model_servers.chat.messages import ImagePart, Message, TextPart
from trimtab_model_servers.engine.async_engine import AsyncEngine
from trimtab_model_servers.engine.core import EngineEvent
from trimtab_model_servers.engine.request import FinishReason, Image, Request, RequestDone
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_pipelines.model_spec import ModelSpec

WARM_UP_TOKENS = 2
_SIDE_PX = 64


def warm_up(spec: ModelSpec, engine: AsyncEngine, tokenizer: ChatTokenizer, encoder: VisionEncoder | None) -> None:
    """Run a text-only chat, and with an encoder one with an image; raises ModelError. Blocks."""
    try:
        _generate(engine, tokenizer, [])
        if encoder is not None:
            count = encoder.token_rule.count(_SIDE_PX, _SIDE_PX)
            _generate(engine, tokenizer, encode_gray_image(encoder), encoder.embedding_shape(count))
    except (RuntimeError, ValueError, RefusalError) as error:
        raise ModelError(f"model {spec.name!r} cannot answer a chat: {type(error).__name__}: {error}") from error


def encode_gray_image(encoder: VisionEncoder) -> list[Tensor]:
    file = io.BytesIO()
    Pillow.new("L", (_SIDE_PX, _SIDE_PX), 128).save(file, "PNG")
    with torch.inference_mode():
        return encoder.encode([encoder.preprocess(file.getvalue(), 1)])


def _generate(engine: AsyncEngine, tokenizer: ChatTokenizer, images: list[Tensor], *shapes: EmbeddingShape) -> None:
    content = (*(ImagePart(type="image") for _ in images), TextPart(type="text", text="?"))
    prompt = tokenizer.build_prompt([Message(role="user", content=content)], shapes)
    inputs = tuple(
        Image("warm-up", span.start, span.placeholders, len(rows), segments=span.segments)
        for span, rows in zip(prompt.image_spans, images, strict=True)
    )
    events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
    engine.submit(Request("warm-up", prompt.tokens, inputs, max_new_tokens=WARM_UP_TOKENS), images, events.put)
    while not isinstance(event := events.get(), RequestDone):
        pass
    if event.finish_reason is FinishReason.ERROR:
        raise ValueError(event.error)
