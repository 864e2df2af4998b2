"""The standard tests of `langchain_client.py`, told what our pipelines do; nothing of ours is imported."""

import json
import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

ORDER = json.loads(os.environ["TRIMTAB_CHATS"])
MOST_WORDS = 16


class TestPipeline(ChatModelIntegrationTests):  # type: ignore[misc] # known in its own environment only
    """What pipelines do not do (tools, structured output, sound) the suite leaves out."""

    @property
    def has_tool_calling(self) -> bool:
        """Not done."""
        return False

    @property
    def has_structured_output(self) -> bool:
        """Not done."""
        return False

    @property
    def chat_model_class(self) -> Any:
        """OpenAI's."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Where it is, and as many words as small models write."""
        return {
            "model": ORDER["model"],
            "base_url": ORDER["base_url"],
            "api_key": ORDER["key"] or "none",
            "max_completion_tokens": MOST_WORDS,
            "max_retries": 0,
            "timeout": ORDER["patience_seconds"],
            "stream_usage": True,
        }

    def test_images_of_ours(self, model: BaseChatModel) -> None:
        """In both ways in which LangChain writes images."""
        page = ORDER["page"]
        for shown in (
            {"type": "image_url", "image_url": {"url": page}},
            {"type": "image", "base64": page.rpartition(",")[2], "mime_type": "image/png"},
        ):
            answer = model.invoke([HumanMessage(content=[{"type": "text", "text": ORDER["question"]}, shown])])
            assert answer.usage_metadata is not None  # noqa: S101 - a test
            assert answer.usage_metadata["input_tokens"] > MOST_WORDS  # noqa: S101
