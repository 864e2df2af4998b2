"""Parser of chat request bodies. Limits on size and number are checked before images are decoded."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol import Buffer
from trimtab_protocol.chat.data_urls import MEDIA_MARKER, data_url_payload, decode_data_url, extract_data_urls
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.image_urls import parse_target
from trimtab_protocol.chat.openai_requests import ChatRequest, parse_chat_request
from trimtab_protocol.errors import InvalidChat
from trimtab_protocol.sanitize import printable

_URL = re.compile(r"[\x00-\x20]*([a-z][a-z0-9+.-]*:/|https?:|file:)", re.IGNORECASE)
SOURCES = ("url", "uri", "image", "video", "audio", "path")
"""Ends of the names of fields that engines read files from."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a chat: its data URL as sent, or its URL."""

    field: str
    data: Buffer | None
    url: str = ""


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A parsed chat whose images are counted but not decoded."""

    request: ChatRequest
    images: tuple[ImageInput, ...]
    messages: list[Any] | None = None
    """As written, if they are forwarded to a third-party engine."""
    media: Mapping[str, Buffer] = field(default_factory=dict)
    """Data URLs of audio and video by the marker that takes their place in messages."""

    @property
    def image_bytes(self) -> int:
        """Total decoded size of its data URLs."""
        images = sum(memoryview(image.data).nbytes * 3 // 4 for image in self.images if image.data is not None)
        return images + sum(memoryview(url).nbytes for url in self.media.values())


def parse_chat(body: Buffer, max_json_bytes: int, bounds: ImageLimits, *, forwarded: bool = False) -> ParsedChat:
    """Parse a body; data URLs share its memory. Raises InvalidChat if the chat is invalid.

    `forwarded`: a third-party engine may serve it, with fields and content parts that only the engine knows.
    """
    extracted = extract_data_urls(body, max_json_bytes, bounds.max_per_request)
    request, written = parse_chat_request(extracted.json, forwarded=forwarded)
    if len(request.image_urls) > bounds.max_per_request:
        text = f"the chat has {len(request.image_urls)} images; send at most {bounds.max_per_request}"
        raise InvalidChat(text, param="messages", code="too_many_images")
    images = tuple(_image_input(where, url, extracted.urls.get(url), bounds) for where, url in request.image_urls)
    image_urls = {url for _, url in request.image_urls}
    media = {marker: url for marker, url in extracted.urls.items() if marker not in image_urls}
    messages = written["messages"]
    for turn, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages[{turn}].content[{index}]"
            if part.get("text") in media:
                raise InvalidChat(f"{where}.text is a data URL; send images as image_url", param=f"{where}.text")
            if forwarded and not request.messages[turn].content[index].is_image:
                require_allowed_urls(part, where, bounds)
    if not forwarded:
        return ParsedChat(request, images)
    if media and (stray := json.dumps({**written, "messages": None})) and any(marker in stray for marker in media):
        raise InvalidChat("the body has a data URL outside its messages; send images in messages", param="messages")
    return ParsedChat(request, images, messages, media)


def require_allowed_urls(value: object, where: str, bounds: ImageLimits) -> None:
    """Raise InvalidChat for what the engine would read from elsewhere, unless images may be fetched from there."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in {"type", "text"}:
                require_allowed_urls(item, f"{where}.{printable(name, 64)}", bounds)
    elif isinstance(value, list):
        for item in value:
            require_allowed_urls(item, where, bounds)
    elif isinstance(value, str) and not value.startswith(("data:", MEDIA_MARKER.decode())):
        is_source = _URL.match(value) is not None or where.endswith(SOURCES)
        if is_source:
            parse_target(value, where, bounds)


def _image_input(field: str, url: str, extracted: Buffer | None, bounds: ImageLimits) -> ImageInput:
    data: Buffer | None = url.encode() if extracted is None and url[:5].lower() == "data:" else extracted
    if data is None:
        return ImageInput(field, None, url)
    data_url_payload(data, bounds.max_bytes, field)  # rejects oversized images before memory is reserved
    return ImageInput(field, data)


def validate_image_file(file: bytes, field: str, bounds: ImageLimits) -> bytes:
    """Return an image file if its header is valid and its size within limits; raises InvalidChat."""
    if len(file) > bounds.max_bytes:
        text = f"{field} has {len(file)} bytes; send at most {bounds.max_bytes}"
        raise InvalidChat(text, param=field, code="image_too_large")
    read_header(file, field, int(bounds.max_megapixels * 1e6))
    return file


def decode_images(chat: ParsedChat, bounds: ImageLimits) -> Iterator[bytes | ImageInput]:
    """The file of each image, one at a time; images with a URL are returned unchanged.

    Raises InvalidChat if the image is invalid or too large.
    """
    for image in chat.images:
        if image.data is None:
            yield image
        else:
            yield validate_image_file(decode_data_url(image.data, bounds.max_bytes, image.field), image.field, bounds)
