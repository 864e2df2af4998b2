"""Chats whose answers are known: as many images as are asked for, and a score to the letter."""

import json

import numpy as np
import pytest

from tests.builders import a_pipeline
from trimtab_loadtester.chats import ChatPayloads, pages_of
from trimtab_loadtester.payloads import payload_source

PNG = b"\x89PNG"


def test_a_chat_has_a_place_for_each_image_and_is_the_same_each_time():
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


def test_only_the_right_answer_is_right():
    source = ChatPayloads(seed=3)
    truth = str(source.payload(0).truth)

    scores = [source.score(truth, {"text": np.array([said], dtype=object)}) for said in (truth.encode(), b"", b"no")]

    assert [(score.correct, score.total) for score in scores] == [(1, 1), (0, 1), (0, 1)]


def test_how_many_pages_is_read_from_the_annotation():
    pipeline = a_pipeline()
    pipeline.metadata.annotations["trimtab.dev/payloads"] = "lmm-digits: pages=2"
    payload = payload_source(pipeline).payload(0)

    assert {tensor.name: tensor.shape for tensor in payload.inputs} == {"messages": (1,), "images": (1, 2)}


@pytest.mark.parametrize("written", ["page=1", "pages=", "pages=one", "pages=1..x", "3"])
def test_what_is_not_understood_is_refused(written):
    with pytest.raises(ValueError, match=r"pages=0\.\.3"):
        pages_of(written)


def test_more_pages_than_there_are_questions_for_are_refused():
    with pytest.raises(ValueError, match="between 0 and 3"):
        ChatPayloads(0, "pages=1..9")
