"""Chats of OpenAI's SDK with a pipeline, compared with each other; runs in the SDK's own environment.

It reads one JSON object: base_url, model, key, ca, timeout_seconds, page (a data URL), question. It prints another: the
models, and the errors of invalid requests.
"""

import asyncio
import json
import ssl
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

MAX_TOKENS, LONG = 12, 400
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CANCELLED = 4


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def complete(response: Any) -> tuple[Any, ...]:
    """Text, finish reason and tokens of a complete response."""
    (choice,), usage = response.choices, response.usage
    return choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens


def joined(chunks: list[Any]) -> tuple[Any, ...]:
    """The same of a streamed response."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
    text = "".join(choice.delta.content or "" for choice in choices)
    reason = next(choice.finish_reason for choice in choices if choice.finish_reason)
    return text, reason, usage.prompt_tokens, usage.completion_tokens


def ask_in_turn(client: OpenAI, chat: dict[str, Any]) -> tuple[Any, ...]:
    """Ask in each synchronous way; returns the response to all of them."""
    create = client.chat.completions.create
    response = complete(create(**chat))
    text, reason, prompt_tokens, _ = response
    assert (bool(text), reason) == (True, "length")
    assert joined(list(create(**chat, **STREAMED))) == response
    assert create(**chat, extra_body={"dry_run": True}).usage.prompt_tokens == prompt_tokens
    assert len(create(**chat, n=3, temperature=1.0, seed=5).choices) == 3
    assert complete(create(**chat, stop=text[-2:]))[1] == "stop"
    with create(**chat | {"max_completion_tokens": LONG}, stream=True) as stream:  # it is left after its first token
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    return response


def errors(client: OpenAI, chat: dict[str, Any]) -> dict[str, Any]:
    """The SDK's errors for invalid and unsupported requests."""
    changes: dict[str, dict[str, Any]] = {
        "unsupported": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "unknown_model": {"model": "none"},
        "bad_image": {"messages": [{"role": "user", "content": [image_part("data:image/png;base64,AAAA")]}]},
        "too_long": {"max_completion_tokens": 1_000_000},
    }
    met = {}
    for name, change in changes.items():
        try:
            client.chat.completions.create(**chat | change)
        except openai.APIStatusError as error:
            met[name] = [type(error).__name__, error.status_code, error.param, error.code]
    return met


async def ask_at_once(client: AsyncOpenAI, chat: dict[str, Any], response: tuple[Any, ...]) -> None:
    """Send many chats at a time, and cancel some of them."""
    create = client.chat.completions.create
    together = await asyncio.gather(*(create(**chat) for _ in range(8)))
    assert {complete(each)[0] for each in together} == {response[0]}
    stream = await create(**chat, **STREAMED)
    assert joined([chunk async for chunk in stream]) == response
    long = [asyncio.ensure_future(create(**chat | {"max_completion_tokens": LONG})) for _ in range(CANCELLED)]
    await asyncio.sleep(0.1)
    for task in long:
        task.cancel()
    ends = await asyncio.gather(*long, return_exceptions=True)
    assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == CANCELLED


async def main() -> None:
    order = json.load(sys.stdin)
    content = [image_part(order["page"]), {"type": "text", "text": order["question"]}]
    messages = [{"role": "user", "content": content}]
    chat = {"model": order["model"], "messages": messages, "max_completion_tokens": MAX_TOKENS}
    transport = {"verify": ssl.create_default_context(cafile=order["ca"]) if order["ca"] else True, "trust_env": False}
    server = {"base_url": f"{order['base_url']}/v1", "api_key": order["key"] or "none"}
    server |= {"timeout": order["timeout_seconds"]}
    with OpenAI(**server, http_client=openai.DefaultHttpx2Client(**transport)) as client:
        response = await asyncio.to_thread(ask_in_turn, client, chat)
        answer = {"models": [model.id for model in client.models.list()], "errors": errors(client, chat)}
    async with AsyncOpenAI(**server, http_client=openai.DefaultAsyncHttpx2Client(**transport)) as asynchronous:
        await ask_at_once(asynchronous, chat, response)
    print(json.dumps(answer))


if __name__ == "__main__":
    asyncio.run(main())
