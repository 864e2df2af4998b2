"""A first chat, before any caller's: buffers and kernels are there then, and what cannot run is found."""

import io
import queue

import torch
from PIL import Image as Pillow
from torch import Tensor

from trimtab_model_servers.chat.interfaces import ChatTokenizer, Rows, VisionEncoder
from trimtab_model_servers.chat.messages import ImagePart, Message, TextPart
from trimtab_model_servers.engine.async_engine import AsyncEngine
from trimtab_model_servers.engine.core import Event
from trimtab_model_servers.engine.request import FinishReason, Image, Request, RequestDone
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_pipelines.model_spec import ModelSpec

TRIAL_TOKENS = 2
_SIDE_PX = 64


def warm_up(spec: ModelSpec, engine: AsyncEngine, writing: ChatTokenizer, seeing: VisionEncoder | None) -> None:
    """Answer a chat about no image, and one about an image where there is an encoder. Blocks.

    Raises:
        ModelError: why the model cannot run.
    """
    try:
        _ask(engine, writing, [])
        if seeing is not None:
            count = seeing.rule.count(_SIDE_PX, _SIDE_PX)
            _ask(engine, writing, encode_one(seeing), seeing.rows(count))
    except (RuntimeError, ValueError, RefusalError) as error:
        raise ModelError(f"model {spec.name!r} cannot answer a chat: {type(error).__name__}: {error}") from error


def encode_one(seeing: VisionEncoder) -> list[Tensor]:
    """Encode a grey image. Blocks."""
    file = io.BytesIO()
    Pillow.new("L", (_SIDE_PX, _SIDE_PX), 128).save(file, "PNG")
    with torch.inference_mode():
        return seeing.encode([seeing.pixels(file.getvalue(), 1)])


def _ask(engine: AsyncEngine, writing: ChatTokenizer, images: list[Tensor], *each: Rows) -> None:
    content = (*(ImagePart(type="image") for _ in images), TextPart(type="text", text="?"))
    prompt = writing.prompt([Message(role="user", content=content)], each)
    places = tuple(
        Image("trial", place.start, place.placeholders, len(rows), pieces=place.pieces)
        for place, rows in zip(prompt.places, images, strict=True)
    )
    said: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Request("trial", prompt.tokens, places, max_new_tokens=TRIAL_TOKENS), images, said.put)
    while not isinstance(event := said.get(), RequestDone):
        pass
    if event.ending is FinishReason.ERROR:
        raise ValueError(event.error)
