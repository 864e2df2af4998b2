"""Chat parser: data URLs are extracted from bodies, and oversized bodies rejected before costly work."""

import base64
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.chat.test_images import a_file
from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.chat_parser import ImageInput, decode_images, parse_chat
from trimtab_protocol.chat.data_urls import decode_data_url, extract_data_urls
from trimtab_protocol.errors import InvalidChat

FILE = bytes(range(256)) * 8
URL = "data:image/png;base64," + base64.b64encode(FILE).decode()


def body(*urls, text="hello"):
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": text}, *images]}]}).encode()


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


def urls_in(left):
    return [part["image_url"]["url"] for part in json.loads(left)["messages"][0]["content"][1:]]


def test_data_urls_are_replaced_by_markers():
    other = URL.replace("AAEC", "AQEC")
    lifted = extract_data_urls(body(URL, other), 1000, 16)

    first, second = urls_in(lifted.json)
    assert decode_data_url(lifted.urls[first], 4096, "image") == FILE
    assert decode_data_url(lifted.urls[second], 4096, "image") != FILE
    assert len(lifted.json) < 1000


@given(st.text(max_size=400), st.text(max_size=400))
def test_text_around_data_urls_is_unchanged(before, after):
    written = body(URL, text=f"?{before}{URL}" + '"data:image/png;base64,' + after + "\\")
    lifted = extract_data_urls(written, 2**16, 16)

    content = json.loads(lifted.json)["messages"][0]["content"]
    assert content[0] == json.loads(written)["messages"][0]["content"][0]
    assert decode_data_url(lifted.urls[content[1]["image_url"]["url"]], 4096, "image") == FILE


@pytest.mark.parametrize(
    "written",
    [
        URL,
        URL.replace("image/png", "image"),
        URL.replace("image/png", ""),
        URL.replace("image/png", "image/png;charset=utf-8"),
        URL.rstrip("="),
        URL[:100] + "\n" + URL[100:],
    ],
)
@pytest.mark.parametrize("slashes", [False, True])
def test_client_variants_of_data_urls_are_extracted(written, slashes):
    sent = body(written)
    lifted = extract_data_urls(sent.replace(b"/", b"\\/") if slashes else sent, 1000, 16)

    assert decode_data_url(lifted.urls[urls_in(lifted.json)[0]], 4096, "image") == FILE


def test_clients_cannot_forge_a_marker():
    forged = body("lifted:0:0", URL)
    lifted = extract_data_urls(forged, 1000, 16)

    assert urls_in(lifted.json)[0] not in lifted.urls


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (body(URL, text="x" * 2000), "beside its images"),
        (b'{"a": [' + b"0," * 2**20 + b"0]}", "beside its images"),
        (b'{"url": "data:image/png;base64,' + b"A" * 500, "has no end"),
        (b'{"url": "data:image/png;base64,' + b"A" * 500 + b'\\"A"}', "a backslash before a quote"),
        (b'{"url": "data:image/png;base64,' + b"A" * 500 + b'\\\\"}', "a backslash before a quote"),
    ],
)
def test_invalid_body_is_rejected(written, why):
    with pytest.raises(InvalidChat, match=why):
        extract_data_urls(written, 2000, 16)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (b"data:image/png;base64,!!!!", "not base64"),
        (b"data:image/png;base64,", "is empty"),
        (b"data:image/png,%89PNG", "not a base64 data URL"),
        (b"data:image/png;base64," + b"A" * 8000, "send at most 4096"),
    ],
)
def test_invalid_data_url_is_rejected(url, why):
    with pytest.raises(InvalidChat, match=why) as caught:
        decode_data_url(url, 4096, "messages[0].content[1].image_url")
    assert caught.value.param == "messages[0].content[1].image_url"
    assert caught.value.code == "invalid_image"
