"""`EmbeddingClient`: fetches embeddings from other replicas into memory that torch computes on, and verifies them."""

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

from trimtab_model_servers.chat.messages import CHECKSUM, ROWS, WIDTH
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.http_client import Tls

FETCH_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 2.0
_READ_BYTES: Final = 2**20


class ImageRefusal(RefusalError):
    """An image's embeddings are unavailable; the router may have the image encoded elsewhere."""

    def __init__(self, image: int, message: str) -> None:
        super().__init__(502, f"image {image}: {message}")
        self.image = image


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """An image by its number in its chat, and the expected rows of its embeddings."""

    number: int
    rows: int


class EmbeddingClient:
    """HTTP client with persistent connections, secured with ``tls``; for one event loop."""

    def __init__(self, tls: Tls = lambda: None, timeout_seconds: float = FETCH_SECONDS) -> None:
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=_CONNECT_SECONDS)
        self._session: aiohttp.ClientSession | None = None
        self.fetched_bytes = 0
        self.fetch_seconds = 0.0

    async def fetch(self, url: str, images: Sequence[EmbeddingRequest]) -> list[Tensor]:
        """Fetch embeddings that one replica stores, [rows, width] FP32 each; ImageRefusal unless as expected."""
        began = asyncio.get_running_loop().time()
        first = images[0].number
        try:
            async with self._open().get(url, ssl=self._tls() or True, allow_redirects=False) as response:
                if response.status != 200:
                    raise ImageRefusal(first, f"{url} answered {response.status}: {await _reason(response)}")
                embeddings = await _read_embeddings(response, url, images)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ImageRefusal(first, f"{url}: {type(error).__name__}: {error}") from error
        self.fetched_bytes += sum(rows.nbytes for rows in embeddings)
        self.fetch_seconds += asyncio.get_running_loop().time() - began
        return embeddings

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=connector, auto_decompress=False, read_bufsize=_READ_BYTES
            )
        return self._session


async def _read_embeddings(
    response: aiohttp.ClientResponse, url: str, images: Sequence[EmbeddingRequest]
) -> list[Tensor]:
    width = _require_shape(response.headers, url, images)
    buffer = np.empty((sum(image.rows for image in images), width), dtype=np.float32)
    target, position = buffer.reshape(-1).view(np.uint8).data, 0
    async for chunk in response.content.iter_any():
        if position + len(chunk) > len(target):
            raise ImageRefusal(images[-1].number, "the response has more bytes than its rows")
        target[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != len(target):
        raise ImageRefusal(images[-1].number, f"the response ended after {position} of {len(target)} bytes")
    embeddings = np.split(buffer, np.cumsum([image.rows for image in images])[:-1])
    checksums = response.headers.get(CHECKSUM, "").split(",")
    for image, rows, checksum in itertools.zip_longest(images, embeddings, checksums[: len(images)]):
        if f"{zlib.crc32(rows.data):08x}" != checksum:
            raise ImageRefusal(image.number, "its checksum differs: it was damaged in transfer")
    return [torch.from_numpy(rows) for rows in embeddings]


def _require_shape(headers: Mapping[str, str], url: str, images: Sequence[EmbeddingRequest]) -> int:
    """Return the width; raises ImageRefusal unless the response has the expected rows."""
    try:
        rows, width = [int(count) for count in headers[ROWS].split(",")], int(headers[WIDTH])
    except (KeyError, ValueError) as error:
        raise ImageRefusal(images[0].number, f"{url}: the response does not state its rows and width") from error
    expected = [image.rows for image in images]
    if rows != expected or not 0 < width <= 2**16:
        raise ImageRefusal(images[0].number, f"the response has {rows} rows of width {width}; expected {expected} rows")
    return width


async def _reason(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(512)).decode(errors="replace")
