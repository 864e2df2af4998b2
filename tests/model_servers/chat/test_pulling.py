"""Embeddings pulled from another replica, with certificates shown on both sides."""

import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from tests.router.edge.identities import Holder
from tests.router.edge.openssl import Authority
from trimtab_model_servers.chat.pulling import CHECKSUM, DIGEST, ROWS, WIDTH, ImageRefusal, Puller
from trimtab_model_servers.chat.words import Reference
from trimtab_protocol.mutual_tls import MutualTls

EMBEDDINGS = np.arange(6, dtype=np.float32).reshape(3, 2)


@asynccontextmanager
async def keeping(tls: ssl.SSLContext | None) -> AsyncIterator[Reference]:
    """A replica that keeps one image."""

    async def give(_: web.BaseRequest) -> web.Response:
        raw = EMBEDDINGS.tobytes()
        headers = {ROWS: "3", WIDTH: "2", DIGEST: "d", CHECKSUM: f"{zlib.crc32(raw):08x}"}
        return web.Response(body=raw, headers=headers)

    runner = web.ServerRunner(web.Server(give, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    scheme, port = "http" if tls is None else "https", runner.addresses[0][1]
    yield Reference(url=f"{scheme}://127.0.0.1:{port}/v2/models/encode/embeddings/a-0", rows=3)
    await runner.cleanup()


async def test_who_shows_a_certificate_of_the_same_authority_is_given_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca").begin()
    own, strange = (Authority(tmp_path / name).begin() for name in ("own", "strange"))
    encoder = MutualTls(Holder(tmp_path / "encode").take(authority, authority).identity())
    text = MutualTls(Holder(tmp_path / "text").take(authority, authority).identity())
    other = MutualTls(Holder(tmp_path / "other").take(strange, own).identity())
    async with keeping(encoder.listening()) as reference:
        puller, stranger = Puller(text.connecting), Puller(other.connecting)
        assert np.array_equal((await puller.pull(reference, 0)).numpy(), EMBEDDINGS)
        with pytest.raises(ImageRefusal, match="image 0"):
            await stranger.pull(reference, 0)
        await puller.close()
        await stranger.close()
