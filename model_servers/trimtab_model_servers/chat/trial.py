"""A first chat, before any caller's: buffers and kernels are there then, and what cannot run is found."""

import io
import queue

import torch
from PIL import Image as Pillow
from torch import Tensor

from trimtab_model_servers.chat.kit import Rows, Seeing, Writing
from trimtab_model_servers.chat.words import ImagePart, Message, TextPart
from trimtab_model_servers.engine.core import Event
from trimtab_model_servers.engine.engine import Engine
from trimtab_model_servers.engine.values import Done, Ending, Image, Request
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_pipelines.model_spec import ModelSpec

TRIAL_TOKENS = 2
_SIDE_PX = 64


def try_out(spec: ModelSpec, engine: Engine, writing: Writing, seeing: Seeing | None) -> None:
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


def encode_one(seeing: Seeing) -> list[Tensor]:
    """Encode a grey image. Blocks."""
    file = io.BytesIO()
    Pillow.new("L", (_SIDE_PX, _SIDE_PX), 128).save(file, "PNG")
    with torch.inference_mode():
        return seeing.encode([seeing.pixels(file.getvalue(), 1)])


def _ask(engine: Engine, writing: Writing, images: list[Tensor], *each: Rows) -> None:
    content = (*(ImagePart(type="image") for _ in images), TextPart(type="text", text="?"))
    prompt = writing.prompt([Message(role="user", content=content)], each)
    places = tuple(
        Image("trial", place.start, place.placeholders, len(rows), pieces=place.pieces)
        for place, rows in zip(prompt.places, images, strict=True)
    )
    said: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Request("trial", prompt.tokens, places, max_new_tokens=TRIAL_TOKENS), images, said.put)
    while not isinstance(event := said.get(), Done):
        pass
    if event.ending is Ending.ERROR:
        raise ValueError(event.error)
