"""Containers that speak OpenAI: where they may stand, and what is said of them where they may not."""

from typing import Any

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.engines import a_served
from tests.router.layouts import PULLS, WHOLE, a_choosing_writer
from tests.router.parted import an_encoder

POINTS = [{"name": "fast", "accuracy": 0.8}, {"name": "slow", "accuracy": 0.9}]


def test_an_engine_may_be_the_whole_reader_of_a_stage_that_chooses():
    served = a_served(WHOLE) | {"encoder": "Colocated"}
    writer = a_choosing_writer() | {"variants": [a_variant(PULLS), served]}
    stage = a_chat_pipeline([an_encoder(), writer]).spec.stage("text")

    assert [one.name for one in stage.variants if one.container and one.container.serves_chats] == [WHOLE]
    assert stage.excluded_input(WHOLE) == "references"


def test_other_containers_are_written_as_before():
    assert "speaks" not in a_stage_of(container={"image": "triton:1"}).variants[0].model_dump()["container"]


def a_stage_of(**changes: Any) -> Any:
    return a_pipeline([a_stage(variants=[a_variant(family="", storageUri="", **changes)])]).spec.stages[0]


def unread() -> dict[str, Any]:
    writer = a_writer(variants=[a_served()])
    writer["inputs"][0]["name"] = "said"
    return writer


WRONG = {
    "where nothing is written": (
        [a_stage("text", variants=[a_served()])],
        "speaks OpenAI, so the stage must say writes",
    ),
    "who pulls": (
        [an_encoder(), a_choosing_writer() | {"variants": [a_served(PULLS), a_variant(WHOLE, encoder="Colocated")]}],
        f"variant {PULLS} .* must read images itself",
    ),
    "without messages": ([unread()], "needs an input messages"),
    "with ways to run": ([a_writer(variants=[a_served() | {"operatingPoints": POINTS}])], "no operating point"),
    "ready nowhere": ([a_writer(variants=[a_served(readyPath="/v2/health/ready")])], "name its own: /health"),
    "in another tongue": ([a_writer(variants=[a_served(protocol="Ollama")])], "OpenInference.*OpenAI"),
}


@pytest.mark.parametrize(("stages", "words"), WRONG.values(), ids=WRONG)
def test_an_engine_anywhere_else_is_refused_by_name(stages: list[dict[str, Any]], words: str):
    with pytest.raises(ValueError, match=words):
        a_chat_pipeline(stages)
