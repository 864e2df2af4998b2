"""Chats with known answers: requested number of images, and exact scores."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.builders import a_pipeline
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.multimodal.traffic import Request
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads, DrawnChats, parse_pages
from trimtab_loadtester.payloads.sources import payload_source, require_chats
from trimtab_pipelines.documents import load_pipeline

LMM_DIGITS = Path(__file__).parents[2] / "pipelines" / "lmm-digits"
PNG = b"\x89PNG"


def test_chat_has_a_placeholder_for_each_image():
    source = ChatPayloads(seed=3)
    seen = set()
    for index in range(12):
        payload, again = source.payload(index), source.payload(index)
        tensors = {tensor.name: tensor.array for tensor in payload.inputs}
        content = json.loads(tensors["messages"][0])[0]["content"]
        images = tensors.get("images", np.empty((1, 0)))[0].tolist()
        seen.add(len(images))
        assert [part["type"] for part in content] == ["image"] * len(images) + ["text"]
        assert all(image.startswith(PNG) for image in images)
        assert payload.truth == again.truth
    assert seen == {0, 1, 2, 3}


def test_only_the_exact_answer_is_correct():
    source = ChatPayloads(seed=3)
    truth = str(source.payload(0).truth)

    scores = [source.score(truth, {"text": np.array([said], dtype=object)}) for said in (truth.encode(), b"", b"no")]

    assert [(score.correct, score.total) for score in scores] == [(1, 1), (0, 1), (0, 1)]


def test_page_count_comes_from_the_annotation():
    pipeline = a_pipeline()
    pipeline.metadata.annotations["trimtab.dev/payloads"] = "lmm-digits: pages=2"
    payload = payload_source(pipeline).payload(0)

    assert {tensor.name: tensor.shape for tensor in payload.inputs} == {"messages": (1,), "images": (1, 2)}


@pytest.mark.parametrize("written", ["page=1", "pages=", "pages=one", "pages=1..x", "3"])
def test_invalid_annotation_is_rejected(written):
    with pytest.raises(ValueError, match=r"pages=0\.\.3"):
        parse_pages(written)


def test_too_many_pages_are_rejected():
    with pytest.raises(ValueError, match=r"within 0\.\.3"):
        ChatPayloads(0, "pages=1..9")


def shown_by(payload):
    tensors = {tensor.name: tensor.array for tensor in payload.inputs}
    return tensors["images"][0].tolist() if "images" in tensors else []


def test_chat_has_the_requested_unique_images():
    source = ChatPayloads(seed=3)
    seen = [
        image
        for index, images in enumerate((0, 1, 4, 16))
        for image in shown_by(source.chat_with_images(index, images))
    ]

    assert len(seen) == len(set(seen)) == 21
    payload = source.chat_with_images(3, 16)
    content = json.loads(payload.inputs[0].array[0])[0]["content"]
    assert [part["type"] for part in content] == ["image"] * 16 + ["text"]
    assert payload.truth == source.chat_with_images(3, 3).truth
    assert payload.images == 16


def test_sampled_chats_have_the_images_of_their_requests():
    source = DrawnChats([Request(0.0, 9, 0), Request(0.5, 9, 4), Request(0.7, 9, 1)], seed=1)

    assert [source.payload(index).images for index in range(3)] == [0, 4, 1]


@pytest.mark.parametrize(("annotation", "given"), [("random", None), ("lmm-digits", "mine")])
def test_multimodal_load_without_chats_is_rejected(annotation, given):
    pipeline = a_pipeline()
    pipeline.metadata.annotations["trimtab.dev/payloads"] = annotation

    with pytest.raises(LoadError, match=r"load 'multimodal:rps=5' sets the images of each chat"):
        require_chats(pipeline, "multimodal:rps=5", given)
    require_chats(load_pipeline(LMM_DIGITS), "multimodal:rps=5", None)
