"""Parameters of a chat completion request."""

import json

import pytest

from trimtab_protocol.chat.internal_wire import chat_tensors, message_values, options_per_choice
from trimtab_protocol.chat.openai_requests import parse_chat_request
from trimtab_protocol.errors import InvalidChat

HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields):
    return parse_chat_request(json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def one_message(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


def test_plain_chat_is_parsed():
    chat = parse()

    assert (chat.choices, chat.streams, chat.includes_usage, chat.image_urls) == (1, False, False, [])
    assert message_values(chat.messages) == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert options_per_choice(chat, tenant="") == [{}]


def test_options_are_forwarded_with_a_seed_per_choice():
    chat = parse(
        max_tokens=5, max_completion_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=-1, stop="x",
        ignore_eos=True, logprobs=True, n=2, seed=3,
    )  # fmt: skip

    first, second = options_per_choice(chat, tenant="key:anna")
    assert first == {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 0, "stop": ["x"],
        "ignore_eos": True, "logprobs": True, "tenant": "key:anna", "seed": 3,
    }  # fmt: skip
    assert second == first | {"seed": 4}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "image_url", "image_url": "u"},
        {"type": "input_image", "image_url": "u"},
        {"type": "image", "image": "u"},
    ],
)
def test_client_variants_of_image_parts_are_accepted(part):
    chat = parse(messages=one_message({"type": "input_text", "text": "what?"}, part))

    assert chat.image_urls == [("messages[0].content[1].image_url", "u")]
    assert message_values(chat.messages)[0]["content"] == [{"type": "text", "text": "what?"}, {"type": "image"}]


def test_roles_are_mapped_to_model_roles():
    messages = [{"role": "developer", "content": "be brief"}, *HELLO, {"role": "assistant", "content": None}]

    roles = [message["role"] for message in message_values(parse(messages=messages).messages)]
    assert roles == ["system", "user", "assistant"]


def test_unknown_fields_and_neutral_values_are_accepted():
    parse(
        store=True, service_tier="auto", metadata={"a": "b"}, user="u", colour=["red"], tools=None, tool_choice="auto",
        response_format={"type": "text"}, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, stream_options=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": one_message({"type": "input_audio"})}, "messages[0].content[0].type"),
        ({"messages": one_message({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": one_message({"type": "image_url"})}, "messages[0].content[0].image_url"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream": "perhaps"}, "stream"),
        ({"model": None}, "model"),
    ],
)
def test_invalid_field_is_named(fields, param):
    with pytest.raises(InvalidChat) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param.rpartition("]")[2].lstrip(".") in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "m"}', b"\xff\xfe{}", b"[" * 10**6])
def test_invalid_bodies_are_rejected(body):
    with pytest.raises(InvalidChat):
        parse_chat_request(body)


def test_rows_share_equal_values():
    chat = parse(n=3, messages=one_message({"type": "image_url", "image_url": "u"}))
    file = b"png"
    inputs = chat_tensors(chat, [file], options_per_choice(chat, tenant="t"))

    assert {name: array.shape for name, array in inputs.items()} == {
        "messages": (3,),
        "options": (3,),
        "images": (3, 1),
    }
    assert all(row[0] is file for row in inputs["images"])


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [one_message("")[0] | {"content": [{"type": "text", "text": ""}] * 41}] * 100,
            "has 4100 parts; send at most 4096",
        ),
        ([{"role": "user", "content": ""}] * 1025, "has 1025 messages; send at most 1024"),
        ([{"role": "user", "content": [7] * 4097}], "has 4097 parts; send at most 4096"),
    ],
)
def test_too_many_parts_are_rejected_before_parsing(messages, why):
    with pytest.raises(InvalidChat, match=why) as refused:
        parse(messages=messages)

    assert refused.value.param == "messages"
    assert len(parse(messages=one_message(*[{"type": "text", "text": "a"}] * 4096)).messages[0].content) == 4096
