"""Embeddings fetched from another replica with mutual TLS."""

import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from tests.router.envoy.openssl import Authority, Holder
from trimtab_model_servers.chat.embedding_client import (
    CHECKSUM,
    ROWS,
    WIDTH,
    EmbeddingClient,
    EmbeddingRequest,
    ImageRefusal,
)
from trimtab_protocol.mutual_tls import MutualTls

EMBEDDINGS = np.arange(6, dtype=np.float32).reshape(3, 2)
WANTED = (EmbeddingRequest(4, 2), EmbeddingRequest(5, 1))


@asynccontextmanager
async def keeping(tls: ssl.SSLContext | None, **other: str) -> AsyncIterator[str]:
    """A replica that stores two images, the first with two rows."""

    async def give(_: web.BaseRequest) -> web.Response:
        parts = EMBEDDINGS[:2].tobytes(), EMBEDDINGS[2:].tobytes()
        headers = {ROWS: "2,1", WIDTH: "2", CHECKSUM: ",".join(f"{zlib.crc32(one):08x}" for one in parts)}
        return web.Response(
            body=b"".join(parts), headers=headers | {f"Trimtab-{name}": value for name, value in other.items()}
        )

    runner = web.ServerRunner(web.Server(give, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    scheme, port = "http" if tls is None else "https", runner.addresses[0][1]
    yield f"{scheme}://127.0.0.1:{port}/v2/models/encode/embeddings/a-0,1"
    await runner.cleanup()


async def test_client_with_trusted_certificate_fetches_embeddings(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca").begin()
    own, strange = (Authority(tmp_path / name).begin() for name in ("own", "strange"))
    encoder = MutualTls(Holder(tmp_path / "encode").take(authority, authority).identity())
    text = MutualTls(Holder(tmp_path / "text").take(authority, authority).identity())
    other = MutualTls(Holder(tmp_path / "other").take(strange, own).identity())
    async with keeping(encoder.server_context()) as url:
        client, untrusted = EmbeddingClient(text.client_context), EmbeddingClient(other.client_context)
        first, second = await client.fetch(url, WANTED)
        assert np.array_equal(first.numpy(), EMBEDDINGS[:2])
        assert np.array_equal(second.numpy(), EMBEDDINGS[2:])
        with pytest.raises(ImageRefusal, match="image 4"):
            await untrusted.fetch(url, WANTED)
        await client.close()
        await untrusted.close()


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Rows": "3"}, r"image 4: the response has \[3\] rows of width 2; expected \[2, 1\] rows"),
        ({"Rows": "2,x"}, "image 4: .* the response does not state its rows"),
        ({"Width": "1"}, "image 5: the response has more bytes"),
        ({"Width": "3"}, "image 5: the response ended after 24 of 36 bytes"),
        ({"Checksum": "00000000,00000000"}, "image 4: its checksum differs"),
        ({"Checksum": f"{zlib.crc32(EMBEDDINGS[:2].tobytes()):08x}"}, "image 5: its checksum differs"),
    ],
)
async def test_unexpected_embeddings_are_rejected_by_image(headers: dict[str, str], why: str) -> None:
    async with keeping(None, **headers) as url:
        client = EmbeddingClient()
        with pytest.raises(ImageRefusal, match=why):
            await client.fetch(url, WANTED)
        await client.close()
