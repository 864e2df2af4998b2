"""Pending images, which arrive after their chat."""

import asyncio

import pytest

from trimtab_model_servers.chat.embedding_client import ImageRefusal
from trimtab_model_servers.chat.embedding_store import PendingImages
from trimtab_model_servers.chat.messages import read_arrived, read_share_request
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef

URL = "http://encoder:9000/v2/models/encode/embeddings/a-0"
ANNOUNCED = EmbeddingRef(url="pending:", rows=4, digest="d")


def arrived(image: int, **changes) -> ArrivedImage:
    return ArrivedImage(**{"image": image, "url": URL, "rows": 4, "digest": "d"} | changes)


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
