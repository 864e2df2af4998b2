"""Chat parser: rejects oversized bodies before costly work."""

import base64
import time

import pytest

from tests.protocol.chat.test_data_urls import URL, body
from tests.protocol.chat.test_image_header import a_file
from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.chat_parser import ImageInput, decode_images, parse_chat
from trimtab_protocol.errors import InvalidChat

BOUNDS = ImageLimits(max_bytes=2**16, max_per_request=2)


def chat(written):
    return b'{"model": "m", ' + written[1:]


def a_url(file):
    return "data:image/png;base64," + base64.b64encode(file).decode()


def test_images_are_listed_in_order():
    file = a_file("PNG", 300, 200, mode="L")
    read = parse_chat(chat(body(a_url(file), "https://store.example/a.png")), 1000, BOUNDS)

    assert list(decode_images(read, BOUNDS)) == [
        file,
        ImageInput("messages[0].content[2].image_url", None, "https://store.example/a.png"),
    ]
    assert abs(read.image_bytes - len(file)) < 32


def test_short_data_url_is_an_image():
    file = a_file("PNG", 1, 1, mode="L")
    assert list(decode_images(parse_chat(chat(body(a_url(file))), 1000, BOUNDS), BOUNDS)) == [file]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (body(URL, URL, URL), "more than 2 images"),
        (body("u", "u", "u"), "has 3 images; send at most 2"),
        (body("data:;base64," + "A" * 2**17), r"image_url has 98304 bytes; send at most 65536"),
        (body(text=URL), "is a data URL; send images as image_url"),
    ],
)
def test_invalid_chat_is_rejected_before_decoding(written, why):
    with pytest.raises(InvalidChat, match=why):
        parse_chat(chat(written), 1000, BOUNDS)


def test_invalid_image_is_rejected_with_its_field():
    with pytest.raises(InvalidChat, match=r"messages\[0\].content\[1\].image_url is not a PNG"):
        list(decode_images(parse_chat(chat(body(URL)), 1000, BOUNDS), BOUNDS))


def test_large_invalid_body_is_rejected_cheaply():
    url = "data:image/png;base64," + "A" * 2**20
    large = chat(body(*[url] * 17))

    began = time.process_time()
    with pytest.raises(InvalidChat, match="more than 16 images"):
        parse_chat(large, 2**20, ImageLimits())
    assert time.process_time() - began < 0.05
