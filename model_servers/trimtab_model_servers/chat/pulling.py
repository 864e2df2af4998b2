"""Embeddings pulled from who encoded them, into memory that torch computes on, and checked."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Final

import aiohttp
import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.chat.words import Reference
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.http import Tls

ROWS, WIDTH, DIGEST, CHECKSUM = "Trimtab-Rows", "Trimtab-Width", "Trimtab-Digest", "Trimtab-Checksum"
PULL_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 2.0
_READ_BYTES: Final = 2**20
_BYTES_A_NUMBER: Final = 4


class ImageRefusal(RefusalError):
    """An image could not be had; whoever routes may have it encoded elsewhere."""

    def __init__(self, image: int, message: str) -> None:
        super().__init__(502, f"image {image}: {message}")
        self.image = image


class Puller:
    """Pulls over connections that are kept, secured with ``tls``; used on one event loop."""

    def __init__(self, tls: Tls = lambda: None, timeout_seconds: float = PULL_SECONDS) -> None:
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=_CONNECT_SECONDS)
        self._session: aiohttp.ClientSession | None = None
        self.pulled_bytes = 0
        self.seconds = 0.0

    async def pull(self, reference: Reference, image: int) -> Tensor:
        """Fetch an image's embeddings, [rows, width] FP32.

        Raises:
            ImageRefusal: they cannot be had, are not what was told, or came damaged.
        """
        began = asyncio.get_running_loop().time()
        try:
            async with self._get(reference.url) as response:
                if response.status != 200:
                    raise ImageRefusal(image, f"{reference.url} answered {response.status}: {await _reason(response)}")
                rows = await _received(response, reference, image)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ImageRefusal(image, f"{reference.url}: {type(error).__name__}: {error}") from error
        self.pulled_bytes += rows.nbytes
        self.seconds += asyncio.get_running_loop().time() - began
        return rows

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


async def _received(response: aiohttp.ClientResponse, reference: Reference, image: int) -> Tensor:
    rows, width = _size(response.headers, reference, image)
    buffer = np.empty((rows, width), dtype=np.float32)
    into, at, checksum = buffer.reshape(-1).view(np.uint8).data, 0, 0
    async for piece in response.content.iter_any():
        if at + len(piece) > len(into):
            raise ImageRefusal(image, "more bytes came than its rows have")
        into[at : at + len(piece)] = piece
        at, checksum = at + len(piece), zlib.crc32(piece, checksum)
    if at != len(into):
        raise ImageRefusal(image, f"{at} of {len(into)} bytes came")
    if f"{checksum:08x}" != response.headers.get(CHECKSUM):
        raise ImageRefusal(image, "its checksum differs; it came damaged")
    return torch.from_numpy(buffer)


def _size(headers: Mapping[str, str], reference: Reference, image: int) -> tuple[int, int]:
    try:
        rows, width = int(headers[ROWS]), int(headers[WIDTH])
    except (KeyError, ValueError) as error:
        raise ImageRefusal(image, f"{reference.url} does not say how many rows it gives") from error
    if rows != reference.rows or not 0 < width <= 2**16:
        raise ImageRefusal(image, f"{rows} rows of {width} came; {reference.rows} rows were told")
    return rows, width


async def _reason(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(512)).decode(errors="replace")
