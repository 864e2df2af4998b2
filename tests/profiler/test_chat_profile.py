"""Profiling chats: without images, stopped at the first token, and of a tenant new to the replica."""

import json

import numpy as np

from tests.router.disaggregated import a_choosing_pipeline
from trimtab_profiler import chat_profile
from trimtab_profiler.inputs import request_rows, stage_rows
from trimtab_protocol import Tensor


def rows():
    pipeline = a_choosing_pipeline()
    return stage_rows(pipeline, pipeline.spec.stage("text"), request_rows(pipeline, 4), 4)


def test_without_images_removes_images_and_placeholders():
    textual = chat_profile.without_images(rows())

    assert set(textual) == {"messages", "options"}
    (message,) = json.loads(textual["messages"][0])
    assert [part["type"] for part in message["content"]] == ["text"]
    assert json.loads(rows()["messages"][0])[0]["content"][0]["type"] == "image"  # the others keep theirs


def test_first_token_only_changes_max_tokens_alone():
    begun = chat_profile.first_token_only(rows())

    assert json.loads(begun["options"][0])["max_tokens"] == 1
    assert begun["messages"] is rows()["messages"] or list(begun["messages"]) == list(rows()["messages"])


def test_longer_prompt_repeats_text_and_keeps_images():
    (message,) = json.loads(chat_profile.with_longer_prompt(rows(), 3)["messages"][0])
    (before,) = json.loads(rows()["messages"][0])

    said = [part["text"] for part in before["content"] if part["type"] == "text"]
    assert [part["text"] for part in message["content"] if part["type"] == "text"] == [" ".join(said * 3)]
    assert [part["type"] for part in message["content"]] == [part["type"] for part in before["content"]]
    plain = {"messages": np.array([b'[{"role": "user", "content": "why?"}]'], object)}
    assert json.loads(chat_profile.with_longer_prompt(plain, 2)["messages"][0]) == [
        {"role": "user", "content": "why? why?"}
    ]


def test_generation_is_measured_by_token_and_with_images_if_any():
    pipeline = a_choosing_pipeline()
    text, encode = pipeline.spec.stage("text"), pipeline.spec.stage("encode")

    assert chat_profile.needs_chat_profile(text, rows())
    assert chat_profile.needs_chat_profile(text, chat_profile.without_images(rows()))
    assert not chat_profile.needs_chat_profile(encode, rows())
    assert [chat_profile.measured_kinds(own) for own in (rows(), chat_profile.without_images(rows()))] == [4, 2]


def test_mean_tokens_come_from_usage():
    usage = np.array([[9, 4, 0, 0, 9], [7, 2, 0, 0, 7]], dtype=np.int64)

    assert chat_profile.mean_tokens([Tensor("usage", "INT64", usage)]) == (8.0, 3.0)
    assert chat_profile.mean_tokens([Tensor("usage", "INT64", usage * 0)]) == (1.0, 1.0)
