"""Chats with a pipeline by OpenAI's SDK; runs in the SDK's own environment, which knows nothing of Trimtab.

One object of JSON on stdin: base_url, model, key, ca, patience_seconds, page (a data URL), question. On stdout one line
of JSON: what each way of asking was answered.
"""

import asyncio
import json
import ssl
import sys
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

WORDS = 12
LONG = 400


def messages(order: dict[str, Any]) -> Any:
    """A question about a page."""
    shown = {"type": "image_url", "image_url": {"url": order["page"]}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": order["question"]}]}]


def told(answer: Any) -> dict[str, Any]:
    """A whole answer, as far as it is compared."""
    (choice,), usage = answer.choices, answer.usage
    return {
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def heard(chunks: list[Any]) -> dict[str, Any]:
    """The same, of an answer in parts."""
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
    return {
        "text": "".join(choice.delta.content or "" for choice in said),
        "finish_reason": next(choice.finish_reason for choice in said if choice.finish_reason),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def in_turn(client: OpenAI, order: dict[str, Any]) -> dict[str, Any]:
    """Ask one thing after the other."""
    asked = {"model": order["model"], "messages": messages(order), "max_completion_tokens": WORDS}
    parts = {"stream": True, "stream_options": {"include_usage": True}}
    counted = client.chat.completions.create(**asked, extra_body={"dry_run": True})
    with client.chat.completions.create(**asked | {"max_completion_tokens": LONG}, stream=True) as stream:
        left_after = next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    whole = told(client.chat.completions.create(**asked))
    stopped = client.chat.completions.create(**asked, stop=whole["text"][-2:])
    return {
        "models": [model.id for model in client.models.list()],
        "whole": whole,
        "parts": heard(list(client.chat.completions.create(**asked, **parts))),
        "choices": len(client.chat.completions.create(**asked, n=3, temperature=1.0, seed=5).choices),
        "stopped": told(stopped),
        "counted": counted.usage.prompt_tokens,
        "left_after": bool(left_after.choices[0].delta.content),
        "refused": refused(client, asked),
    }


def refused(client: OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """What is not done, as the SDK's own errors."""
    met = {}
    changes: dict[str, dict[str, Any]] = {
        "unsupported": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "unknown_model": {"model": "none"},
        "bad_image": {"messages": [{"role": "user", "content": [image("data:image/png;base64,AAAA")]}]},
        "too_long": {"max_completion_tokens": 1_000_000},
    }
    for name, change in changes.items():
        try:
            client.chat.completions.create(**asked | change)
        except openai.APIStatusError as error:
            met[name] = [type(error).__name__, error.status_code, error.param, error.code]
    return met


def image(url: str) -> dict[str, Any]:
    """An image of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


async def at_once(client: AsyncOpenAI, order: dict[str, Any]) -> dict[str, Any]:
    """Ask many things at a time, and give some of them up."""
    asked = {"model": order["model"], "messages": messages(order), "max_completion_tokens": WORDS}
    answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    parts = heard([chunk async for chunk in stream])
    given_up = [
        asyncio.ensure_future(client.chat.completions.create(**asked | {"max_completion_tokens": LONG}))
        for _ in range(4)
    ]
    await asyncio.sleep(0.1)
    for task in given_up:
        task.cancel()
    ends = await asyncio.gather(*given_up, return_exceptions=True)
    return {
        "texts": sorted({told(answer)["text"] for answer in answers}),
        "parts": parts,
        "given_up": sum(isinstance(end, asyncio.CancelledError) for end in ends),
    }


async def main() -> None:
    """Read the order, ask, print the answers."""
    order = json.load(sys.stdin)
    trusted = ssl.create_default_context(cafile=order["ca"]) if order["ca"] else True
    own = {"base_url": order["base_url"], "api_key": order["key"] or "none", "timeout": order["patience_seconds"]}
    with OpenAI(**own, http_client=openai.DefaultHttpx2Client(verify=trusted, trust_env=False)) as client:
        answers = await asyncio.to_thread(in_turn, client, order)
    async with AsyncOpenAI(
        **own, http_client=openai.DefaultAsyncHttpx2Client(verify=trusted, trust_env=False)
    ) as client:
        answers["at_once"] = await at_once(client, order)
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main())
