"""Clients that chat: OpenAI's SDK, LiteLLM, LangChain's standard tests, AIPerf, each in an environment of its own.

The model has random weights and takes the likeliest token, so that all ways of asking must be answered the same.
"""

import base64
import json
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from benchmarks.clients.target import PATIENCE_SECONDS, Target, WrongAnswerError
from benchmarks.clients.tools import installed, output_of
from trimtab_training.lmm_digits.tokenizer_training import train_tokenizer

HERE = Path(__file__).parent
QUESTION = "count>"
PAGE_SIDE_PX = 96
GIVEN_UP = 4
OFFERED = {
    "request_count": 40.0,
    "request_error_rate": 0.0,
    "num_images": 1.0,
    "usage_prompt_tokens": 40.0 + 22.0,  # of a page 16 tokens and 4 registers, and who speaks, twice
    "usage_completion_tokens": 12.0,
}
"""What AIPerf should count, each chat on average."""
REFUSED = {
    "unsupported": ["BadRequestError", 400, "tools", "unsupported_parameter"],
    "unknown_model": ["NotFoundError", 404, None, "model_not_found"],
    "bad_image": ["BadRequestError", 400, "messages[0].content[0].image_url", "invalid_image"],
    "too_long": ["BadRequestError", 400, None, "InvalidArgument"],
}


def openai_sdk(target: Target) -> str:
    """Ask by OpenAI's SDK: in turn and at once, whole and in parts, with an image; leave; ask what is not done."""
    answer = _asked("openai", "openai_client.py", target)
    whole, at_once = answer["whole"], answer["at_once"]
    _require(answer["models"] == [target.model], f"models are {answer['models']}")
    _require(whole["finish_reason"] == "length" and bool(whole["text"]), f"the answer is {whole}")
    _require(answer["parts"] == at_once["parts"] == whole, f"in parts {answer['parts']}, whole {whole}")
    _require(at_once["texts"] == [whole["text"]], f"at once {at_once['texts']}, whole {whole['text']!r}")
    _require(answer["choices"] == 3, f"{answer['choices']} choices of 3")
    _require(answer["stopped"]["finish_reason"] == "stop", f"a stop word gave {answer['stopped']}")
    _require(answer["counted"] == whole["prompt_tokens"], f"a dry run counted {answer['counted']}")
    _require(answer["left_after"] and at_once["given_up"] == GIVEN_UP, "what was given up went on")
    _require(answer["refused"] == REFUSED, f"refused as {answer['refused']}")
    return "sync, async, streamed, with an image, left in the middle: the same answer; errors of its own kinds"


def litellm(target: Target) -> str:
    """Ask by LiteLLM, whole and in parts."""
    answer = _asked("langchain", "litellm_client.py", target)
    _require(bool(answer["whole"]) and answer["whole"] == answer["parts"], f"answered {answer}")
    _require(answer["tokens"][0] == answer["tokens"][1], f"it counted {answer['tokens']} tokens")
    return "whole and in parts the same, its tokens counted once"


def langchain(target: Target) -> str:
    """Run LangChain's standard tests against `ChatOpenAI`."""
    answer = _asked("langchain", "langchain_client.py", target)
    _require(not answer["failed"], f"failed: {', '.join(answer['failed'])}")
    _require(answer["passed"] > 0, "no test ran")
    return f"{answer['passed']} of its standard tests passed, {answer['skipped']} are of what is not done"


def aiperf(target: Target) -> str:
    """Let NVIDIA's AIPerf offer streamed chats with an image each, and compare what it counted."""
    told = _asked("aiperf", "aiperf_client.py", target, tokenizer=train_tokenizer().to_str())
    counted = {name: told[name]["avg"] for name in OFFERED}
    _require(counted == OFFERED, f"it counted {counted}; right is {OFFERED}")
    first, between, rate = (told[name] for name in ("time_to_first_token", "inter_token_latency", "request_throughput"))
    _require(0 < first["avg"] <= told["request_latency"]["avg"], f"first token after {first}")
    return (
        f"{OFFERED['request_count']:g} streamed chats with an image each; first token p50 {first['p50']:.0f} ms, "
        f"p99 {first['p99']:.0f} ms, {between['avg']:.1f} ms a token, {rate['avg']:.0f} chats a second"
    )


CHAT_CLIENTS: Mapping[str, Callable[[Target], str]] = {
    "openai_sdk": openai_sdk,
    "litellm": litellm,
    "langchain_standard_tests": langchain,
    "aiperf": aiperf,
}


def _asked(
    environment: Literal["openai", "langchain", "aiperf"], script: str, target: Target, **more: str
) -> dict[str, Any]:
    order = {
        "base_url": f"{target.base_url}/v1",
        "model": target.model,
        "key": target.key,
        "ca": str(target.ca) if target.ca else None,
        "patience_seconds": PATIENCE_SECONDS,
        "page": _page(),
        "question": QUESTION,
        **more,
    }
    python = installed(environment) / "bin" / "python"
    told = output_of([str(python), str(HERE / script)], json.dumps(order).encode())
    answer: dict[str, Any] = json.loads(told.strip().splitlines()[-1])
    return answer


def _page() -> str:
    """Noise, as a data URL."""
    file = BytesIO()
    pixels = np.random.default_rng(1).integers(256, size=(PAGE_SIDE_PX, PAGE_SIDE_PX), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - as an assertion has it
    if not holds:
        raise WrongAnswerError(otherwise)
