"""Chats with a pipeline by LiteLLM, whole and in parts; runs in an environment of its own.

One object of JSON on stdin: base_url, model, key, ca, patience_seconds, page (a data URL), question. On stdout one line
of JSON: the texts, and the tokens it counted for them.
"""

import json
import os
import sys
from typing import Any

WORDS = 12


def ask(order: dict[str, Any]) -> dict[str, Any]:
    """Ask, and tell what came."""
    import litellm  # noqa: PLC0415  (reads the environment while it is imported)

    shown = {"type": "image_url", "image_url": {"url": order["page"]}}
    asked = {
        "model": f"openai/{order['model']}",
        "api_base": order["base_url"],
        "api_key": order["key"] or "none",
        "messages": [{"role": "user", "content": [shown, {"type": "text", "text": order["question"]}]}],
        "max_tokens": WORDS,
        "timeout": order["patience_seconds"],
    }
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks)
    return {
        "whole": whole.choices[0].message.content,
        "parts": joined.choices[0].message.content,
        "tokens": [whole.usage.total_tokens, joined.usage.total_tokens],
    }


def main() -> None:
    """Read the order, ask, print the answers."""
    order = json.load(sys.stdin)
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the web what models cost
    if order["ca"]:
        os.environ["SSL_CERT_FILE"] = order["ca"]
    print(json.dumps(ask(order)))


if __name__ == "__main__":
    main()
