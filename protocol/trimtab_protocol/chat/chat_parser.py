"""A chat's body, read in the order that costs least: how much, how many, what, and only then its images. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol import Buffer
from trimtab_protocol.chat.data_urls import data_url_payload, decode_data_url, extract_data_urls
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.openai_requests import ChatRequest, parse_chat_request


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a chat; its data URL as it was written, or where it is to be fetched."""

    field: str
    data: Buffer | None
    url: str = ""


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A chat whose images are counted, and not decode_images yet."""

    request: ChatRequest
    images: tuple[ImageInput, ...]

    @property
    def image_bytes(self) -> int:
        """What its data URLs have once they are decode_images."""
        return sum(memoryview(image.data).nbytes * 3 // 4 for image in self.images if image.data is not None)


def parse_chat(body: Buffer, max_json_bytes: int, bounds: ImageLimits) -> ParsedChat:
    """Read a body; what it shows shares its memory.

    Raises:
        InvalidChat: naming what is wrong.
    """
    lifted = extract_data_urls(body, max_json_bytes, bounds.max_per_request)
    asked = parse_chat_request(lifted.json)
    for turn, message in enumerate(asked.messages):
        for place, part in enumerate(message.content):
            if not part.is_image and part.text in lifted.urls:
                where = f"messages[{turn}].content[{place}].text"
                raise InvalidChat(f"{where} is a data URL; send images as image_url", param=where)
    if len(asked.image_urls) > bounds.max_per_request:
        text = f"the chat has {len(asked.image_urls)} images; send at most {bounds.max_per_request}"
        raise InvalidChat(text, param="messages", code="too_many_images")
    return ParsedChat(asked, tuple(_shown(field, url, lifted.urls.get(url), bounds) for field, url in asked.image_urls))


def _shown(field: str, url: str, lifted: Buffer | None, bounds: ImageLimits) -> ImageInput:
    data: Buffer | None = url.encode() if lifted is None and url[:5].lower() == "data:" else lifted
    if data is None:
        return ImageInput(field, None, url)
    data_url_payload(data, bounds.max_bytes, field)  # what is too large for ever is told before room is sought for it
    return ImageInput(field, data)


def validate_image_file(file: bytes, field: str, bounds: ImageLimits) -> bytes:
    """An image's file, once its header says that it is one of bounded size; raises InvalidChat."""
    read_header(file, field, int(bounds.max_megapixels * 1e6))
    return file


def decode_images(chat: ParsedChat, bounds: ImageLimits) -> Iterator[bytes | ImageInput]:
    """The file of each image, one at a time; those that are to be fetched stand as they are.

    Raises:
        InvalidChat: it is no image, or too large a one.
    """
    for image in chat.images:
        if image.data is None:
            yield image
        else:
            yield validate_image_file(decode_data_url(image.data, bounds.max_bytes, image.field), image.field, bounds)
