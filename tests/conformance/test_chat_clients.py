"""Clients of OpenAI's API: OpenAI's SDK, LiteLLM, LangChain's standard tests and AIPerf, each in its environment.

The model generates the likeliest tokens, so that every way to ask must give the same answer.
"""

import base64
import json
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conformance.installed import PROGRAMS, install, run, run_script
from tests.conformance.target import Target
from tests.figures import Figures
from trimtab_model_servers.families.lmm_digits.tokenizer import load_default_tokenizer

pytestmark = pytest.mark.conformance

QUESTION = "count>"
PAGE_SIDE_PX = 96
MEASURED_BY_AIPERF = {
    "request_count": 40.0,
    "request_error_rate": 0.0,
    "num_images": 1.0,
    "usage_prompt_tokens": 40.0 + 22.0,  # an image has 16 tokens and 4 registers, and the role is written twice
    "usage_completion_tokens": 12.0,
}
"""Means over all chats."""
LANGCHAIN_OPTIONS = (
    *("-q", "-c", os.devnull, "-p", "no:cacheprovider", "--noconftest"),
    "--override-ini=asyncio_mode=auto",
    # Its clients are kept, so that all tests need the same loop.
    "--override-ini=asyncio_default_test_loop_scope=session",
    "--override-ini=asyncio_default_fixture_loop_scope=session",
    # It fetches images from the web.
    "--deselect=langchain_suite.py::TestPipeline::test_image_inputs",
)


def page_url() -> str:
    file = BytesIO()
    pixels = np.random.default_rng(1).integers(256, size=(PAGE_SIDE_PX, PAGE_SIDE_PX), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_openai_sdk(chat_target: Target) -> None:
    """The script compares the responses of all ways to ask."""
    response = run_script("openai_client.py", "openai", chat_target, page=page_url(), question=QUESTION)

    assert response["models"] == [chat_target.model]
    assert response["errors"] == {
        "unsupported": ["BadRequestError", 400, "tools", "unsupported_parameter"],
        "unknown_model": ["NotFoundError", 404, None, "model_not_found"],
        "bad_image": ["BadRequestError", 400, "messages[0].content[0].image_url", "invalid_image"],
        "too_long": ["BadRequestError", 400, None, "InvalidArgument"],
    }


def test_litellm(chat_target: Target) -> None:
    response = run_script("litellm_client.py", "langchain", chat_target, page=page_url(), question=QUESTION)

    assert response["text"]
    assert response["streamed_text"] == response["text"]
    assert response["streamed_tokens"] == response["tokens"]


def test_langchain_standard_tests(chat_target: Target, figures: Figures) -> None:
    order = {"base_url": f"{chat_target.base_url}/v1", "model": chat_target.model, "key": chat_target.key}
    order |= {"page": page_url(), "question": QUESTION}
    environment = os.environ | {"TRIMTAB_CHATS": json.dumps(order)}
    if chat_target.ca:
        environment["SSL_CERT_FILE"] = str(chat_target.ca)
    python = install("langchain") / "bin" / "python"
    suite = PROGRAMS / "langchain_suite.py"
    command: list[str | Path] = [python, "-m", "pytest", *LANGCHAIN_OPTIONS, "--rootdir", PROGRAMS, suite]
    output = run(command, environment=environment)

    figures.add(tests=output.strip().splitlines()[-1])


def test_aiperf(chat_target: Target, figures: Figures) -> None:
    tokenizer = load_default_tokenizer().to_str()
    report = run_script("aiperf_client.py", "aiperf", chat_target, tokenizer=tokenizer)
    first, between = report["time_to_first_token"], report["inter_token_latency"]
    figures.add(
        time_to_first_token_ms_p50=first["p50"],
        time_to_first_token_ms_p99=first["p99"],
        inter_token_ms=between["avg"],
        chats_per_second=report["request_throughput"]["avg"],
    )

    assert {name: report[name]["avg"] for name in MEASURED_BY_AIPERF} == MEASURED_BY_AIPERF
    assert 0 < first["avg"] <= report["request_latency"]["avg"]
