"""How a pipeline that answers chats takes them: what images may be shown, and from where."""

from typing import Annotated

from pydantic import Field

from trimtab_pipelines.quantity import Bytes
from trimtab_pipelines.resource import Model

Domain = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", max_length=253)]

StoreAddress = Annotated[
    str, Field(pattern=r"^https?://[a-z0-9.-]+(:[0-9]{1,5})?/([A-Za-z0-9._~/-]*/)?$", max_length=1024)
]


class ImageBounds(Model):
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


class Chat(Model):
    """What a chat may be."""

    images: ImageBounds = ImageBounds()
