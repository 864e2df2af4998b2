"""Image URLs that a router may fetch: listed domains, and no private address behind a public name."""

import pytest

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.image_urls import is_public, parse_target
from trimtab_protocol.errors import InvalidChat

BOUNDS = ImageLimits(allowed_domains=("images.example",), trusted_prefixes=("http://minio.models:9000/images/",))


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("https://images.example/a.png", False),
        ("https://IMAGES.example:443/a.png?size=2#x", False),
        ("http://images.example/a.png", False),
        ("http://minio.models:9000/images/a%20b.png?X-Amz-Signature=1", True),
    ],
)
def test_allowed_urls_are_accepted(address, own):
    assert parse_target(address, "f", BOUNDS).trusted is own


@pytest.mark.parametrize(
    "address",
    [
        "https://images.example.evil.net/a.png",
        "https://evil.net/images.example",
        "https://images.example@evil.net/a.png",
        "https://evil.net\\@images.example/a.png",
        "https://evil.net#@images.example/a.png",
        "https://user:pass@images.example/a.png",
        "https://images.example:8080/a.png",
        "https://images.example./a.png",
        "https://sub.images.example/a.png",
        "http://127.0.0.1/a.png",
        "http://[::1]/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
        "http://localhost/a.png",
        "file:///etc/passwd",
        "ftp://images.example/a.png",
        "//images.example/a.png",
        "/etc/passwd",
        "images.example/a.png",
        "gopher://images.example:70/_",
        "http://minio.models:9000/secrets/a.png",
        "http://minio.models:9000/images/../secrets/a.png",
        "http://minio.models:9000/images/%2e%2e/secrets/a.png",
        "http://minio.models:9000/imagesecrets/a.png",
        "https://minio.models:9000/images/a.png",
        "http://minio.models/images/a.png",
        "http://images.example/\r\nHost: evil.net",
        "http://images.example/ a.png",
        "http://imаges.example/a.png",
        "http://images.example:99999/a.png",
        "http://[::1/a.png",
        "https://images.example/" + "a" * 5000,
        "",
    ],
)
def test_other_urls_are_rejected(address):
    with pytest.raises(InvalidChat) as caught:
        parse_target(address, "messages[0].content[0].image_url", BOUNDS)
    assert caught.value.code == "invalid_image_url"


def test_ip_addresses_are_rejected_even_if_listed():
    bounds = ImageLimits(allowed_domains=("10.0.0.1", "0x7f.1", "127.1"))
    for host in ("10.0.0.1", "127.1"):
        with pytest.raises(InvalidChat):
            parse_target(f"http://{host}/a.png", "f", bounds)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("240.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
    ],
)
def test_public_addresses_are_recognized(address, expected):
    assert is_public(address) is expected
