"""Operating points of a third-party engine: tokens per image."""

from typing import Any

import pytest

from tests.builders import a_variant
from tests.router.chats import a_chat, a_chat_pipeline, a_png, a_writer
from tests.router.engines import Engine, a_served
from tests.router.fakes import a_rig
from tests.router.test_chats import ask
from trimtab_pipelines.spec import InferencePipeline

POINTS: list[dict[str, Any]] = [
    {"name": "full", "accuracy": 0.9, "mmProcessorKwargs": {"max_pixels": 802816}},
    {"name": "few", "accuracy": 0.8, "mmProcessorKwargs": {"max_pixels": 200704}},
]


def a_pipeline(**changes: Any) -> InferencePipeline:
    variant = a_served(engine="vllm") | {"operatingPoints": POINTS}
    return a_chat_pipeline([a_writer(variants=[variant | changes])])


async def test_engine_gets_the_options_of_the_planned_point():
    theirs = Engine(kind="vllm")
    async with a_rig(a_pipeline(), {"text": [theirs]}, operatingPoint="few") as rig:
        for chat in (
            a_chat("one", a_png()),
            a_chat("one", a_png(), mm_processor_kwargs={"max_pixels": 5}),
            a_chat("a"),
        ):
            assert (await ask(rig, chat))[0] == 200

    sent = [asked.get("mm_processor_kwargs") for asked in theirs.asked]
    assert sent == [{"max_pixels": 200704}, {"max_pixels": 5}, None]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (a_served(engine="vllm") | {"operatingPoints": [POINTS[0] | {"precision": "BF16"}]}, "sets precision"),
        (a_served(engine="transformers") | {"operatingPoints": POINTS}, "supported are: none"),
        (a_variant(operatingPoints=POINTS), "only a container with engine: vllm"),
    ],
)
def test_points_that_an_engine_cannot_express_are_refused(variant: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        a_chat_pipeline([a_writer(variants=[variant])])
