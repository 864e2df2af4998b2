"""LangChain's standard tests of a chat model, for a pipeline; run in an environment of their own.

The variable TRIMTAB_CHATS holds one JSON object: base_url, model, key, page (a data URL), question.
"""

import json
import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

ORDER = json.loads(os.environ["TRIMTAB_CHATS"])
MAX_TOKENS = 16


class TestPipeline(ChatModelIntegrationTests):  # type: ignore[misc]  # it is known in its own environment only
    """Without tools and structured output, which pipelines do not support."""

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": ORDER["model"],
            "base_url": ORDER["base_url"],
            "api_key": ORDER["key"] or "none",
            "max_completion_tokens": MAX_TOKENS,
            "max_retries": 0,
            "timeout": 60.0,
            "stream_usage": True,
        }

    def test_images_in_both_forms(self, model: BaseChatModel) -> None:
        url = ORDER["page"]
        for image in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "base64": url.rpartition(",")[2], "mime_type": "image/png"},
        ):
            answer = model.invoke([HumanMessage(content=[{"type": "text", "text": ORDER["question"]}, image])])
            assert answer.usage_metadata is not None
            assert answer.usage_metadata["input_tokens"] > MAX_TOKENS
