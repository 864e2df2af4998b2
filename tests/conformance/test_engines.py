"""Transformers' server as the engine of a stage, with a small model that is made for the test.

Not among the tests of every change: it needs accelerate and OpenAI's package, and about a minute of two cores.
"""

import sys
from pathlib import Path

import pytest

from tests.conformance.installed import install
from tests.local_run import post
from tests.router.chats import a_chat
from tests.tiny_llama import engines_up, write_model

pytestmark = pytest.mark.conformance

SERVE = "import sys; sys.path.append({packages!r}); from transformers.cli.transformers import main; main()"
"""With packages from another environment that the server needs: OpenAI's and accelerate."""


def test_transformers_serve(tmp_path: Path) -> None:
    packages = next((install("transformers") / "lib").glob("python*/site-packages"))
    write_model(tmp_path / "model")
    container = {
        "engine": "transformers",
        "modelName": str(tmp_path / "model"),
        "command": [sys.executable, "-c", SERVE.format(packages=str(packages))],
        "args": ["serve", str(tmp_path / "model"), "--host", "127.0.0.1", "--port", "$(PORT)", "--device", "cpu"],
        "env": {"HF_HUB_OFFLINE": "1"},
    }
    with engines_up(tmp_path, 1, container) as (local, _):
        url = f"http://127.0.0.1:{local.rest_port}/v1/chat/completions"
        chat = a_chat("hello", max_tokens=8, temperature=0.0)
        status, whole = post(url, chat, 60)
        assert status == 200, whole
        assert whole["usage"]["completion_tokens"] == 8
        status, refused = post(url, chat | {"guided_json": {}, "best_of": 2}, 60)
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert post(url, chat, 60)[1]["choices"] == whole["choices"]
