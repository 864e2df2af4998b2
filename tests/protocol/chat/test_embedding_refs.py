"""References to encoded images, round trip between router, replicas and profiler through one type."""

import json
from hashlib import sha256

import numpy as np
import pytest
from pydantic import ValidationError

from trimtab_model_servers.chat.messages import read_arrived, read_references, read_share_request
from trimtab_profiler import inputs
from trimtab_protocol.chat.embedding_refs import (
    BLANK,
    ArrivedImage,
    ChatTokenCounts,
    EmbeddingCounts,
    EmbeddingRef,
    EncodedImage,
    ImageIdentity,
)
from trimtab_protocol.chat.internal_wire import embedding_id, expand_embedding_ids, group_embedding_urls
from trimtab_protocol.errors import ProtocolError
from trimtab_router.execution import chat_images
from trimtab_router.execution.chat_images import arrived_images_body

URLS = [f"http://encoder:9000/v2/models/encode/embeddings/a-{row}" for row in range(2)]
MADE = [EncodedImage(rows=4, digest="family:path:f:4"), EncodedImage(rows=9, columns=2)]


def references_of(*each):
    array = np.empty(len(each), dtype=object)
    array[:] = [one if isinstance(one, bytes) else one.json_bytes() for one in each]
    return array


def test_generation_replica_reads_forwarded_references():
    (row,) = chat_images.join_embeddings(
        {"references": chat_images.addressed_references(references_of(*MADE), URLS)}, chats=1
    )["references"]
    assert read_references(row) == tuple(
        EmbeddingRef(url=url, rows=made.rows, columns=made.columns, digest=made.digest)
        for url, made in zip(URLS, MADE, strict=True)
    )
    assert chat_images.embedding_urls(references_of(row)) == URLS


def test_pending_images_round_trip():
    addressed = chat_images.addressed_references(references_of(*MADE), URLS)
    assert read_arrived(arrived_images_body({3: addressed[0], 5: addressed[1]})) == (
        ArrivedImage(image=3, url=URLS[0], rows=4, digest="family:path:f:4"),
        ArrivedImage(image=5, url=URLS[1], rows=9, columns=2),
    )


@pytest.mark.parametrize("alone", [False, True])
def test_share_request_round_trips(alone):
    file = sha256(b"file").hexdigest()
    assert read_share_request(chat_images.image_lookup(("me", alone, b"file"))) == ImageIdentity(
        file=file, tenant="me", alone=alone
    )


def test_blank_images_of_the_profiler_are_accepted():
    rows = inputs.blank_references(references_of(*MADE))
    assert [read_references(row) for row in rows] == [
        (EmbeddingRef(url=BLANK, rows=4),),
        (EmbeddingRef(url=BLANK, rows=9, columns=2),),
    ]


def test_counted_images_become_blank_images_of_equal_size():
    counted = EmbeddingCounts(rows=(4, 9), columns=(0, 2))
    assert EmbeddingCounts.model_validate_json(counted.json_bytes()).blanks() == (
        EmbeddingRef(url=BLANK, rows=4),
        EmbeddingRef(url=BLANK, rows=9, columns=2),
    )
    assert EmbeddingCounts(rows=(4,)).blanks() == (EmbeddingRef(url=BLANK, rows=4),)
    with pytest.raises(ValidationError, match="same length"):
        EmbeddingCounts(rows=(4, 9), columns=(2,))


def test_unknown_fields_of_replicas_are_ignored():
    (one,) = chat_images.addressed_references(references_of(b'{"rows": 4, "format": "fp16"}'), URLS[:1])
    assert json.loads(one) == {"url": URLS[0], "rows": 4}


@pytest.mark.parametrize("wrong", [b"{}", b'{"rows": 0}', b'{"rows": "many"}', b"[]", b"{"])
def test_invalid_reference_is_rejected(wrong):
    with pytest.raises(ProtocolError, match="invalid embedding reference"):
        chat_images.addressed_references(references_of(wrong), URLS[:1])


@pytest.mark.parametrize("counted", [ChatTokenCounts, EmbeddingCounts])
def test_incomplete_token_counts_are_rejected(counted):
    with pytest.raises(ValidationError):
        counted.model_validate_json(b"{}")


ONE, OTHER = (f"http://lmm-{pod}:9000/v2/models/encode-small/embeddings" for pod in "ab")


def test_embedding_urls_of_a_batch_are_grouped():
    urls = [f"{ONE}/k-0", f"{OTHER}/j-1", f"{ONE}/k-12", f"{ONE}/l-0", f"{OTHER}/j-0"]

    assert group_embedding_urls(urls) == {f"{ONE}/k-0,12": [0, 2], f"{OTHER}/j-1,0": [1, 4], f"{ONE}/l-0": [3]}


def test_url_without_row_is_unchanged():
    urls = [f"{ONE}/gone", "http://a-1:9/b"]
    assert group_embedding_urls(urls) == {urls[0]: [0], urls[1]: [1]}


def test_grouped_ids_expand_to_embedding_ids():
    assert expand_embedding_ids("a-b-0,3") == [embedding_id("a-b", 0), embedding_id("a-b", 3)]
    assert [expand_embedding_ids(name) for name in ("k-7", "gone", "-3", "k-", "k-1,", "k-x")] == [
        ["k-7"],
        ["gone"],
        ["-3"],
        ["k-"],
        ["k-1,"],
        ["k-x"],
    ]
