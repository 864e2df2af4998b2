"""Containers of protocol OpenAI: valid stages, and validation messages."""

from typing import Any

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.disaggregated import an_encoder
from tests.router.engines import a_served
from tests.router.layouts import PULLS, WHOLE, a_choosing_writer

POINTS = [{"name": "fast", "accuracy": 0.8}, {"name": "slow", "accuracy": 0.9}]


def test_openai_container_may_be_a_colocated_variant():
    served = a_served(WHOLE) | {"encoder": "Colocated"}
    writer = a_choosing_writer() | {"variants": [a_variant(PULLS), served]}
    stage = a_chat_pipeline([an_encoder(), writer]).spec.stage("text")

    assert [one.name for one in stage.variants if one.container and one.container.serves_chats] == [WHOLE]
    assert stage.excluded_input(WHOLE) == "references"


def test_default_container_protocol_is_omitted():
    assert "protocol" not in a_stage_of(container={"image": "triton:1"}).variants[0].model_dump()["container"]


def a_stage_of(**changes: Any) -> Any:
    return a_pipeline([a_stage(variants=[a_variant(family="", storageUri="", **changes)])]).spec.stages[0]


def unread() -> dict[str, Any]:
    writer = a_writer(variants=[a_served()])
    writer["inputs"][0]["name"] = "said"
    return writer


WRONG = {
    "no generation stage": (
        [a_stage("text", variants=[a_served()])],
        "requires role Generate",
    ),
    "disaggregated encoder": (
        [an_encoder(), a_choosing_writer() | {"variants": [a_served(PULLS), a_variant(WHOLE, encoder="Colocated")]}],
        f"variant {PULLS} .* its own encoder",
    ),
    "without messages": ([unread()], "requires an input messages"),
    "several operating points": (
        [a_writer(variants=[a_served() | {"operatingPoints": POINTS}])],
        "one operating point",
    ),
    "no ready path": ([a_writer(variants=[a_served(readyPath="/v2/health/ready")])], "set readyPath"),
    "unknown protocol": ([a_writer(variants=[a_served(protocol="Ollama")])], "OpenInference.*OpenAI"),
}


@pytest.mark.parametrize(("stages", "message"), WRONG.values(), ids=WRONG)
def test_misplaced_openai_container_is_rejected(stages: list[dict[str, Any]], message: str):
    with pytest.raises(ValueError, match=message):
        a_chat_pipeline(stages)
