"""Chats for profiles: without images, ended at the first token, and of nobody whom a replica has seen."""

import json

import numpy as np

from tests.router.layouts import a_choosing_pipeline
from trimtab_profiler import chat_profile
from trimtab_profiler.inputs import batch, datatypes, request_rows, stage_rows
from trimtab_protocol import Tensor


def rows():
    pipeline = a_choosing_pipeline()
    return stage_rows(pipeline, pipeline.spec.stage("text"), request_rows(pipeline, 4), 4)


def test_chats_without_images_have_neither_them_nor_their_places():
    textual = chat_profile.textual(rows())

    assert set(textual) == {"messages", "options"}
    (message,) = json.loads(textual["messages"][0])
    assert [part["type"] for part in message["content"]] == ["text"]
    assert json.loads(rows()["messages"][0])[0]["content"][0]["type"] == "image"  # the others keep theirs


def test_a_chat_that_ends_with_its_first_token_is_else_the_same():
    begun = chat_profile.first_token_only(rows())

    assert json.loads(begun["options"][0])["max_tokens"] == 1
    assert begun["messages"] is rows()["messages"] or list(begun["messages"]) == list(rows()["messages"])


def test_a_longer_chat_says_more_and_shows_the_same():
    (message,) = json.loads(chat_profile.with_longer_prompt(rows(), 3)["messages"][0])
    (before,) = json.loads(rows()["messages"][0])

    said = [part["text"] for part in before["content"] if part["type"] == "text"]
    assert [part["text"] for part in message["content"] if part["type"] == "text"] == [" ".join(said * 3)]
    assert [part["type"] for part in message["content"]] == [part["type"] for part in before["content"]]
    plain = {"messages": np.array([b'[{"role": "user", "content": "why?"}]'], object)}
    assert json.loads(chat_profile.with_longer_prompt(plain, 2)["messages"][0]) == [
        {"role": "user", "content": "why? why?"}
    ]
    assert (
        chat_profile.mean_prompt_tokens([Tensor("usage", "INT64", np.array([[9, 4, 0, 0, 9], [7, 2, 0, 0, 7]]))]) == 8.0
    )


def test_each_batch_is_of_a_stranger_and_other_tensors_pass():
    pipeline = a_choosing_pipeline()
    text = pipeline.spec.stage("text")
    tensors = batch(rows(), 2, 0, datatypes(pipeline, text))

    told = {tensor.name: tensor for tensor in chat_profile.without_shared_prefix(tensors, 7)}
    assert {json.loads(one)["tenant"] for one in told["options"].array} == {"stranger-7"}
    assert told["messages"] is next(tensor for tensor in tensors if tensor.name == "messages")


def test_only_who_writes_about_images_is_measured_in_four_ways():
    pipeline = a_choosing_pipeline()
    text, encode = pipeline.spec.stage("text"), pipeline.spec.stage("encode")

    assert chat_profile.may_differ(text, rows())
    assert not chat_profile.may_differ(text, chat_profile.textual(rows()))
    assert not chat_profile.may_differ(encode, rows())


def test_tokens_of_an_answer_are_read_from_its_usage():
    usage = np.array([[9, 4, 0, 0, 9], [9, 2, 0, 0, 9]], dtype=np.int64)

    assert chat_profile.mean_tokens([Tensor("usage", "INT64", usage)]) == 3.0
    assert chat_profile.mean_tokens([Tensor("usage", "INT64", usage * 0)]) == 1.0
