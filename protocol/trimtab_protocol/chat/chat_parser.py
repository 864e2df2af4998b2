"""Parser of chat request bodies. Limits on size and number are checked before images are decoded."""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol import Buffer
from trimtab_protocol.chat.data_urls import data_url_payload, decode_data_url, extract_data_urls
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.openai_requests import ChatRequest, parse_chat_request
from trimtab_protocol.errors import InvalidChat


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

    @property
    def image_bytes(self) -> int:
        """Total decoded size of its data URLs."""
        return sum(memoryview(image.data).nbytes * 3 // 4 for image in self.images if image.data is not None)


def parse_chat(body: Buffer, max_json_bytes: int, bounds: ImageLimits) -> ParsedChat:
    """Parse a body; data URLs share its memory. Raises InvalidChat if the chat is invalid."""
    extracted = extract_data_urls(body, max_json_bytes, bounds.max_per_request)
    request = parse_chat_request(extracted.json)
    for turn, message in enumerate(request.messages):
        for index, part in enumerate(message.content):
            if not part.is_image and part.text in extracted.urls:
                where = f"messages[{turn}].content[{index}].text"
                raise InvalidChat(f"{where} is a data URL; send images as image_url", param=where)
    if len(request.image_urls) > bounds.max_per_request:
        text = f"the chat has {len(request.image_urls)} images; send at most {bounds.max_per_request}"
        raise InvalidChat(text, param="messages", code="too_many_images")
    images = (_image_input(field, url, extracted.urls.get(url), bounds) for field, url in request.image_urls)
    return ParsedChat(request, tuple(images))


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
