"""Embeddings pulled from who encoded them, into memory that torch computes on, and checked."""

import asyncio
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.http_client import Tls

ROWS, WIDTH, CHECKSUM = "Trimtab-Rows", "Trimtab-Width", "Trimtab-Checksum"
PULL_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 2.0
_READ_BYTES: Final = 2**20


class ImageRefusal(RefusalError):
    """An image could not be had; whoever routes may have it encoded elsewhere."""

    def __init__(self, image: int, message: str) -> None:
        super().__init__(502, f"image {image}: {message}")
        self.image = image


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """An image by its number in its chat, and how many rows it should have."""

    number: int
    rows: int


class EmbeddingClient:
    """Pulls over connections that are kept, secured with ``tls``; used on one event loop."""

    def __init__(self, tls: Tls = lambda: None, timeout_seconds: float = PULL_SECONDS) -> None:
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=_CONNECT_SECONDS)
        self._session: aiohttp.ClientSession | None = None
        self.pulled_bytes = 0
        self.seconds = 0.0

    async def pull(self, url: str, wanted: Sequence[EmbeddingRequest]) -> list[Tensor]:
        """Fetch the embeddings of images that one batch left at one replica, [rows, width] FP32 each.

        Raises:
            ImageRefusal: they cannot be had, are not what was told, or came damaged.
        """
        began = asyncio.get_running_loop().time()
        first = wanted[0].number
        try:
            async with self._get(url) as response:
                if response.status != 200:
                    raise ImageRefusal(first, f"{url} answered {response.status}: {await _reason(response)}")
                images = await _received(response, url, wanted)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ImageRefusal(first, f"{url}: {type(error).__name__}: {error}") from error
        self.pulled_bytes += sum(image.nbytes for image in images)
        self.seconds += asyncio.get_running_loop().time() - began
        return images

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _get(self, url: str) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        return self._open().get(url, ssl=self._tls() or True, allow_redirects=False)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=connector, auto_decompress=False, read_bufsize=_READ_BYTES
            )
        return self._session


async def _received(response: aiohttp.ClientResponse, url: str, wanted: Sequence[EmbeddingRequest]) -> list[Tensor]:
    width = _width(response.headers, url, wanted)
    buffer = np.empty((sum(one.rows for one in wanted), width), dtype=np.float32)
    into, at = buffer.reshape(-1).view(np.uint8).data, 0
    async for piece in response.content.iter_any():
        if at + len(piece) > len(into):
            raise ImageRefusal(wanted[-1].number, "more bytes came than its rows have")
        into[at : at + len(piece)] = piece
        at += len(piece)
    if at != len(into):
        raise ImageRefusal(wanted[-1].number, f"{at} of {len(into)} bytes came")
    images = np.split(buffer, np.cumsum([one.rows for one in wanted])[:-1])
    checksums = response.headers.get(CHECKSUM, "").split(",")
    for one, image, checksum in itertools.zip_longest(wanted, images, checksums[: len(wanted)]):
        if f"{zlib.crc32(image.data):08x}" != checksum:
            raise ImageRefusal(one.number, "its checksum differs; it came damaged")
    return [torch.from_numpy(image) for image in images]


def _width(headers: Mapping[str, str], url: str, wanted: Sequence[EmbeddingRequest]) -> int:
    try:
        rows, width = [int(told) for told in headers[ROWS].split(",")], int(headers[WIDTH])
    except (KeyError, ValueError) as error:
        raise ImageRefusal(wanted[0].number, f"{url} does not say how many rows it gives") from error
    if rows != [one.rows for one in wanted] or not 0 < width <= 2**16:
        told = f"{rows} rows of {width} came; {[one.rows for one in wanted]} rows were told"
        raise ImageRefusal(wanted[0].number, told)
    return width


async def _reason(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(512)).decode(errors="replace")
