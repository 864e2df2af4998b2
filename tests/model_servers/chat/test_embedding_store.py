"""Embeddings stored for other replicas, fetched with mutual TLS, and pending images, which arrive after their chat."""

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from tests.router.envoy.openssl import Authority, Holder
from trimtab_model_servers.chat import embedding_store
from trimtab_model_servers.chat.embedding_client import EmbeddingClient, EmbeddingRequest, ImageRefusal
from trimtab_model_servers.chat.embedding_store import EmbeddingStore, PendingImages
from trimtab_model_servers.chat.interfaces import ImageEmbedding
from trimtab_model_servers.chat.messages import CHECKSUM, ROWS, WIDTH, read_arrived, read_share_request
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef
from trimtab_protocol.mutual_tls import MutualTls

URL = "http://encoder:9000/v2/models/encode/embeddings/a-0"
ANNOUNCED = EmbeddingRef(url="pending:", rows=4, digest="d")
GONE = "was dropped, or fetched already"


def an_embedding() -> ImageEmbedding:
    """Embeddings of 24 bytes."""
    return ImageEmbedding(torch.zeros(3, 2), "d")


def arrived(image: int, **changes) -> ArrivedImage:
    return ArrivedImage(**{"image": image, "url": URL, "rows": 4, "digest": "d"} | changes)


async def test_stored_embedding_is_taken_once_and_freed():
    store, embedding = EmbeddingStore(100), an_embedding()
    waiting = asyncio.create_task(store.take(["a"]))
    await asyncio.sleep(0)
    store.put("a", embedding)

    assert await waiting == [embedding]
    with pytest.raises(RefusalError, match=GONE) as refused:
        await store.take(["a"])
    assert refused.value.status_code == 410
    with pytest.raises(RefusalError, match=GONE):
        store.add_names("a", ["other"])
    assert (store.bytes, len(store)) == (0, 0)


@pytest.mark.parametrize("arrives", ["before", "after", "never"])
async def test_dropped_name_fails_at_once_and_stores_nothing(arrives):
    store = EmbeddingStore(100)
    store.expect("a")
    if arrives == "before":
        store.put("a", an_embedding())
    assert store.drop("a")
    if arrives == "after":
        store.put("a", an_embedding())

    async with asyncio.timeout(1.0):
        with pytest.raises(RefusalError, match=GONE):
            await store.take(["a"])
    assert (store.bytes, len(store)) == (0, 0)


async def test_drop_fails_waiting_requests_and_further_names():
    store = EmbeddingStore(100)
    store.expect("a")
    store.add_names("a", ["b"])
    waiting = asyncio.create_task(store.take(["a"]))
    await asyncio.sleep(0)
    store.drop("a")

    for refused in (waiting, store.take(["b"])):
        with pytest.raises(RefusalError, match=GONE):
            await refused
    assert len(store) == 0


async def test_names_are_taken_together_or_not_at_all():
    store, embeddings = EmbeddingStore(100), [ImageEmbedding(torch.zeros(3, 2), name) for name in "ab"]
    for name, embedding in zip("ab", embeddings, strict=True):
        store.expect(name)
        store.put(name, embedding)
    store.expect("c")
    store.fail("c", RefusalError(422, "no image"))
    with pytest.raises(RefusalError, match="no image"):
        await store.take(["a", "c"])

    assert await store.take(["b", "a"]) == embeddings[::-1]
    assert store.bytes == 0


async def test_stored_embeddings_expire_and_are_bounded():
    store = EmbeddingStore(30, ttl_seconds=0.02)
    store.expect("a")
    store.expect("b")
    store.put("a", an_embedding())
    with pytest.raises(RefusalError, match="are stored already"):
        store.put("b", an_embedding())
    with pytest.raises(RefusalError, match="are stored already"):
        await store.take(["b"])
    with pytest.raises(RefusalError, match=r"within 0\.02 s|dropped"):
        await store.take(["never"])
    await asyncio.sleep(0.05)

    assert (store.bytes, len(store)) == (0, 0)


async def test_cancelled_wait_leaves_nothing():
    store = EmbeddingStore(100)
    waiting = asyncio.create_task(store.take(["never"]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(store) == 0


async def test_number_of_remembered_dropped_names_is_bounded(monkeypatch):
    monkeypatch.setattr(embedding_store, "MAX_NAMES", 2)
    store = EmbeddingStore(100)
    for name in ("a", "b", "c"):
        store.drop(name)

    store.expect("a")
    with pytest.raises(RefusalError, match="dropped"):
        store.expect("b")


@pytest.mark.parametrize("after", [False, True])
async def test_shared_embedding_is_taken_once_per_name_and_counts_once(after):
    store, embedding = EmbeddingStore(30), an_embedding()
    store.expect("a")
    if after:
        store.put("a", embedding)
    store.add_names("a", ["b", "c"])
    store.put("a", embedding)

    assert await store.take(["b"]) == [embedding]
    assert store.bytes == embedding.rows.nbytes
    assert await store.take(["a"]) == [embedding]
    assert store.drop("c")
    assert (store.bytes, len(store)) == (0, 0)


@pytest.mark.parametrize("before", [False, True])
async def test_image_may_arrive_before_or_after_its_chat(before):
    pending = PendingImages()
    if before:
        pending.resolve("chat", [arrived(3)])
    waiting = asyncio.create_task(pending.wait_for_url("chat", 3, ANNOUNCED))
    await asyncio.sleep(0)
    if not before:
        pending.resolve("chat", [arrived(3)])

    assert await waiting == URL
    assert len(pending) == 0


@pytest.mark.parametrize("other", [{"rows": 5}, {"digest": "e"}])
async def test_image_that_differs_from_announced_one_is_rejected(other):
    pending = PendingImages()
    pending.resolve("chat", [arrived(3, **other)])
    with pytest.raises(ImageRefusal, match=r"image 3: it has .*; announced were 4 rows, 'd'"):
        await pending.wait_for_url("chat", 3, ANNOUNCED)
    assert len(pending) == 0


async def test_image_that_never_arrives_fails_and_leaves_nothing():
    pending = PendingImages(ttl_seconds=0.02)
    with pytest.raises(ImageRefusal, match="image 1"):
        await pending.wait_for_url("chat", 1, ANNOUNCED)
    left = asyncio.create_task(pending.wait_for_url("other", 1, ANNOUNCED))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert len(pending) == 0
    pending.resolve("other", [arrived(1)])
    assert len(pending) == 0


@pytest.mark.parametrize(
    "body", [b"{}", b'[{"image": -1, "url": "%s", "rows": 4}]' % URL.encode(), b'[{"image": 0, "url": "blank:"}]']
)
def test_invalid_notification_is_rejected(body: bytes):
    with pytest.raises(RefusalError, match="references"):
        read_arrived(body)
    with pytest.raises(RefusalError, match="of"):
        read_share_request(body)


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

    server = RawTestServer(give)
    await server.start_server(ssl=tls)
    yield str(server.make_url("/v2/models/encode/embeddings/a-0,1"))
    await server.close()


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
