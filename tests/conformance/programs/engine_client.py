"""Chats of OpenAI's SDK with an engine that has tools and schemas; runs in the SDK's own environment.

It reads one JSON object: base_url, model, timeout_seconds. It prints another: the results, by kind of request.
"""

import json
import sys
from typing import Any

import openai
from openai import OpenAI

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"sign": {"type": "string", "enum": ["plus", "minus"]}},
        "required": ["sign"],
        "additionalProperties": False,
    },
}


def ask(client: OpenAI, model: str) -> dict[str, Any]:
    create = client.chat.completions.create
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}], "temperature": 0.0}
    schema = {"type": "json_schema", "json_schema": {"name": "sign", "schema": ADD["parameters"], "strict": True}}
    chosen: dict[str, Any] = {"tools": [{"type": "function", "function": ADD}]}
    chosen["tool_choice"] = {"type": "function", "function": {"name": "add"}}
    whole = create(**chat, max_tokens=8, logprobs=True, top_logprobs=2)
    chunks = list(create(**chat, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    called = create(**chat, **chosen, max_tokens=64).choices[0].message
    completion = client.completions.create(model=model, prompt="hello", max_tokens=4, n=2)
    return {
        "text": whole.choices[0].message.content,
        "streamed_text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_tokens": [chunk.usage.completion_tokens for chunk in chunks if chunk.usage],
        "likely": [len(token.top_logprobs) for token in whole.choices[0].logprobs.content],
        "object": create(**chat, response_format=schema, max_tokens=64).choices[0].message.content,
        "tool": [called.content, len(called.tool_calls or ())],
        "completions": len(completion.choices),
        "embeddings": refusal(client, model),
    }


def refusal(client: OpenAI, model: str) -> Any:
    """The status of a route that the engine does not serve."""
    try:
        return len(client.embeddings.create(model=model, input="hello").data[0].embedding)
    except openai.APIStatusError as error:
        return error.status_code


def main() -> None:
    order = json.load(sys.stdin)
    url, seconds = f"{order['base_url']}/v1", order["timeout_seconds"]
    with OpenAI(base_url=url, api_key="none", timeout=seconds, max_retries=0) as client:
        print(json.dumps(ask(client, order["model"])))


if __name__ == "__main__":
    main()
