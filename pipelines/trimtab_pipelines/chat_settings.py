"""How a pipeline that answers chats takes them: what images may be shown, and from where."""

from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field

from trimtab_pipelines.quantity import Bytes
from trimtab_pipelines.resource import Model

SCHEME_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443}
"""The port of an address that names none."""


_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""1 to 65535, as a pattern."""

Domain = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", max_length=253)]

StoreAddress = Annotated[
    str, Field(pattern=rf"^https?://[a-z0-9.-]+(:{_PORT})?/([A-Za-z0-9._~/-]*/)?$", max_length=1024)
]


def _port(store: str) -> int:
    parts = urlsplit(store)
    return parts.port or SCHEME_PORTS[parts.scheme]


class ImageLimits(Model):
    """What images a chat may show, checked before any is decoded."""

    most: int = Field(default=16, ge=0, le=64, description="In one chat")
    megapixels: float = Field(default=40.0, gt=0, le=40, description="Of one image")
    size: Bytes = Field(default=8 * 2**20, ge=1024, description="Of one image's file")
    domains: tuple[Domain, ...] = Field(
        default=(),
        max_length=64,
        description="Hosts, as they are written in addresses, whose images are fetched over https or http. None "
        "unless listed; one that leads to a private address is refused all the same, and redirects are not followed",
    )
    stores: tuple[StoreAddress, ...] = Field(
        default=(),
        max_length=16,
        description="Where addresses begin that are fetched wherever they lead, as https://objects.internal/images/ "
        "of an object store of one's own; it must let readers in without a key, or by what a signed address says",
    )

    @property
    def ports(self) -> frozenset[int]:
        """The ports that images are fetched from: 80 and 443 of domains, its own of each store; none by default."""
        of_domains = SCHEME_PORTS.values() if self.domains else ()
        return frozenset({*of_domains, *map(_port, self.stores)})


class ChatSettings(Model):
    """What a chat may be."""

    images: ImageLimits = ImageLimits()
