"""Chat settings of a pipeline: limits on images and the sources they may be fetched from."""

from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field

from trimtab_pipelines.quantity import Bytes
from trimtab_pipelines.resource import Model

SCHEME_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443}
"""Default ports of URL schemes."""


_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""Pattern of a port, 1 to 65535."""

Domain = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", max_length=253)]

StoreAddress = Annotated[
    str, Field(pattern=rf"^https?://[a-z0-9.-]+(:{_PORT})?/([A-Za-z0-9._~/-]*/)?$", max_length=1024)
]


def _port(store: str) -> int:
    parts = urlsplit(store)
    return parts.port or SCHEME_PORTS[parts.scheme]


class ImageLimits(Model):
    """Limits on the images of a chat, checked before decoding."""

    max_per_request: int = Field(default=16, ge=0, le=64)
    """Maximum number of images in one chat."""
    max_megapixels: float = Field(default=40.0, gt=0, le=40)
    """Maximum size of one image in millions of pixels."""
    max_bytes: Bytes = Field(default=8 * 2**20, ge=1024)
    """Maximum size of one image file."""
    allowed_domains: tuple[Domain, ...] = Field(default=(), max_length=64)
    """Hosts from which images are fetched over http or https; none by default. A host that resolves to a private
    address is rejected, and redirects are not followed.
    """
    trusted_prefixes: tuple[StoreAddress, ...] = Field(default=(), max_length=16)
    """URL prefixes of trusted object stores, such as https://objects.internal/images/, from which images are fetched
    even at private addresses. The store must permit anonymous or pre-signed reads.
    """

    @property
    def ports(self) -> frozenset[int]:
        """Ports from which images are fetched: 80 and 443 for domains, and the ports of trusted prefixes."""
        of_domains = SCHEME_PORTS.values() if self.allowed_domains else ()
        return frozenset({*of_domains, *map(_port, self.trusted_prefixes)})


class ChatSettings(Model):
    """Settings of chats."""

    images: ImageLimits = ImageLimits()
