"""Chats of LiteLLM with a pipeline, complete and streamed; runs in an environment of its own.

It reads one JSON object: base_url, model, key, ca, timeout_seconds, page (a data URL), question. It prints another: the
texts, and the tokens that it counted for them.
"""

import json
import os
import sys
from typing import Any

MAX_TOKENS = 12


def ask(order: dict[str, Any]) -> dict[str, Any]:
    import litellm  # noqa: PLC0415  (it reads the environment while it is imported)

    image = {"type": "image_url", "image_url": {"url": order["page"]}}
    chat = {
        "model": f"openai/{order['model']}",
        "api_base": f"{order['base_url']}/v1",
        "api_key": order["key"] or "none",
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": order["question"]}]}],
        "max_tokens": MAX_TOKENS,
        "timeout": order["timeout_seconds"],
    }
    response = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(chunks)
    return {
        "text": response.choices[0].message.content,
        "streamed_text": streamed.choices[0].message.content,
        "tokens": response.usage.total_tokens,
        "streamed_tokens": streamed.usage.total_tokens,
    }


def main() -> None:
    order = json.load(sys.stdin)
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the web what models cost
    if order["ca"]:
        os.environ["SSL_CERT_FILE"] = order["ca"]
    print(json.dumps(ask(order)))


if __name__ == "__main__":
    main()
