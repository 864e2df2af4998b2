"""Tiled images: the encoder reports the tile grid, and outputs equal those of a colocated model."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_servers.chat.chat_client import (
    DIGESTS,
    a_chat,
    a_chat_spec,
    files,
    messages,
    rows_of_files,
    text_of,
    texts,
)
from tests.model_servers.chat.test_hf_chat import TINY, a_photo, loaded
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.chat.encoder_model import EncoderModel
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.server.chat_loader import load_chat
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.embedding_refs import EmbeddingCounts, ImageIdentity, dump_refs, parse_encoded_image
from trimtab_protocol.chat.internal_wire import TENANTS, dump_tenants

NAME = "smolvlm2-2.2b"
TALL_AND_WIDE = [a_photo(33, 90), a_photo(90, 33)]
"""As many tiles each, in another grid."""
EMBEDDINGS = {"name": "embeddings", "datatype": "FP32", "shape": [-1, 64]}
BROUGHT = [{"name": name, "datatype": "INT64", "shape": [-1]} for name in ("image_rows", "image_columns")]


def part(kind: str, stage: str, inputs: tuple[Any, ...] = (), outputs: list[Any] | None = None) -> Any:
    spec = a_chat_spec(kind, stage, family=f"{NAME}/{stage}", parameters=TINY)
    known = {} if outputs is None else {"outputs": outputs}
    written = spec.model_dump(by_alias=True, mode="json")
    given = [one for one in written["inputs"] if one["name"] not in {"embeddings", "image_rows", "image_digests"}]
    changed = {"inputs": [*given, *(one | {"optional": True} for one in inputs)], **known}
    return load_chat(type(spec).model_validate(written | changed), BatchWorker())


@pytest.fixture
async def colocated():
    hosted = loaded(NAME)
    yield hosted
    await hosted.close()


@pytest.fixture
async def text():
    hosted = part("text", "text", (EMBEDDINGS, *BROUGHT, DIGESTS))
    assert isinstance(hosted, ChatModel)
    yield hosted
    await hosted.close()


async def test_disaggregated_model_equals_colocated_model(colocated, text):
    encoder, worker = part("encode", "encode", outputs=[EMBEDDINGS, *BROUGHT, DIGESTS]), BatchWorker()
    assert isinstance(encoder, EncoderModel)
    encoded = await encoder.infer(InferRequest("encode", (files(*TALL_AND_WIDE),)), worker)
    brought = {tensor.name: tensor for tensor in encoded.outputs}
    assert brought["image_rows"].array.tolist() == [[28, 28]]
    assert brought["image_columns"].array.tolist() == [[2, 3]]
    options = texts("options", json.dumps({"max_tokens": 8, "ignore_eos": True}).encode())
    asked = (texts("messages", messages("What?", 2)), options)

    def turned(columns: list[int]) -> InferRequest:
        other = Tensor("image_columns", "INT64", np.array([columns], dtype=np.int64))
        return InferRequest("text", (*asked, *(brought | {"image_columns": other}).values()))

    answer = await text.infer(turned([2, 3]), worker)
    whole = a_chat("colocated", "What?", *TALL_AND_WIDE, max_tokens=8, ignore_eos=True)
    expected = await colocated.infer(whole, worker)
    assert text_of(answer) == text_of(expected)
    assert text_of(await text.infer(turned([3, 2]), worker)) != text_of(expected)
    for wrong in ([2], [2, -1]):
        with pytest.raises(RefusalError, match=r"image_columns .* should be 0 or more for each of 2 images"):
            await text.infer(turned(wrong), worker)


async def test_disaggregated_counts_equal_colocated_counts(colocated, text):
    encoder = part("keep", "encode")
    of_chat = Tensor("chat_images", "INT64", np.array([[2, 0], [2, 1]], dtype=np.int64))
    shown = InferRequest("encode", (rows_of_files(*TALL_AND_WIDE), of_chat))
    counted = await encoder.count(shown)
    assert counted == EmbeddingCounts(rows=(28, 28), columns=(2, 3))
    asked = texts("messages", messages("What?", 2))
    references = texts("references", dump_refs(counted.blanks()))

    by_parts = await text.count(InferRequest("text", (asked, references)))
    by_whole = await colocated.count(InferRequest("colocated", (asked, files(*TALL_AND_WIDE))))
    assert by_parts == by_whole


async def test_stored_and_cached_images_report_tile_columns():
    encoder = part("keep", "encode")
    tenants = {TENANTS: dump_tenants(["a", "a"])}
    made = await encoder.infer(
        InferRequest("encode", (rows_of_files(*TALL_AND_WIDE),), parameters=tenants), BatchWorker()
    )
    reported = [parse_encoded_image(bytes(one)) for one in made.outputs[0].array]
    assert [(one.rows, one.columns) for one in reported] == [(28, 2), (28, 3)]
    file = reported[1].digest.split(":")[-2]

    assert encoder.add_names(["again"], ImageIdentity(file=file, tenant="a", alone=True)) == reported[1].model_dump()


def test_uniform_gray_tile_is_encoded():
    """The model takes tiles of zeros for padding; no grey of eight bits is one."""
    encoder = part("keep", "encode")
    seeing = encoder.encoder_scheduler.encoder
    for grey in (127, 128):
        photo = a_photo(4, 4, grey)
        with torch.inference_mode():
            assert len(seeing.encode([seeing.preprocess(photo, 1)])[0]) == seeing.token_rule.count(4, 4).placeholders
