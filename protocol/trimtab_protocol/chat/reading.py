"""A chat's body, read in the order that costs least: how much, how many, what, and only then its images. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_pipelines.chat import ImageBounds
from trimtab_protocol import Buffer
from trimtab_protocol.chat.asking import Asked, read_asked
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.images import read_header
from trimtab_protocol.chat.lifting import decode, lift, written_in


@dataclass(frozen=True, slots=True)
class Shown:
    """An image of a chat; its data URL as it was written, or where it is to be fetched."""

    field: str
    data: Buffer | None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat whose images are counted, and not decoded yet."""

    asked: Asked
    images: tuple[Shown, ...]

    @property
    def image_bytes(self) -> int:
        """What its data URLs have once they are decoded."""
        return sum(memoryview(image.data).nbytes * 3 // 4 for image in self.images if image.data is not None)


def read_chat(body: Buffer, most_json_bytes: int, bounds: ImageBounds) -> Chat:
    """Read a body; what it shows shares its memory.

    Raises:
        InvalidChat: naming what is wrong.
    """
    lifted = lift(body, most_json_bytes, bounds.most)
    asked = read_asked(lifted.json)
    for turn, message in enumerate(asked.messages):
        for place, part in enumerate(message.content):
            if not part.shows and part.text in lifted.urls:
                where = f"messages[{turn}].content[{place}].text"
                raise InvalidChat(f"{where} is a data URL; send images as image_url", param=where)
    if len(asked.image_urls) > bounds.most:
        text = f"the chat has {len(asked.image_urls)} images; send at most {bounds.most}"
        raise InvalidChat(text, param="messages", code="too_many_images")
    return Chat(asked, tuple(_shown(field, url, lifted.urls.get(url), bounds) for field, url in asked.image_urls))


def _shown(field: str, url: str, lifted: Buffer | None, bounds: ImageBounds) -> Shown:
    data: Buffer | None = url.encode() if lifted is None and url[:5].lower() == "data:" else lifted
    if data is None:
        return Shown(field, None, url)
    written_in(data, bounds.size, field)  # what is too large for ever is told before room is sought for it
    return Shown(field, data)


def checked_file(file: bytes, field: str, bounds: ImageBounds) -> bytes:
    """An image's file, once its header says that it is one of bounded size; raises InvalidChat."""
    read_header(file, field, int(bounds.megapixels * 1e6))
    return file


def decoded(chat: Chat, bounds: ImageBounds) -> Iterator[bytes | Shown]:
    """The file of each image, one at a time; those that are to be fetched stand as they are.

    Raises:
        InvalidChat: it is no image, or too large a one.
    """
    for image in chat.images:
        if image.data is None:
            yield image
        else:
            yield checked_file(decode(image.data, bounds.size, image.field), image.field, bounds)
