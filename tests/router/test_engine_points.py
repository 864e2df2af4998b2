"""Operating points of a third-party engine: tokens per image."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.builders import a_plan, a_variant
from tests.router.chats import a_chat, a_chat_pipeline, a_png, a_writer
from tests.router.engines import Engine, a_served
from tests.router.fakes import a_rig
from tests.router.test_chats import ask
from tests.router.test_generation import OUTPUTS, Writers
from tests.router.test_queue import Caller
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.replica_slots import Completed
from trimtab_router.scheduling.roles import GenerationScheduler
from trimtab_router.scheduling.stage_request import StageRequest

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
            a_chat("a"),
        ):
            assert (await ask(rig, chat))[0] == 200

    sent = [asked.get("mm_processor_kwargs") for asked in theirs.asked]
    assert sent == [{"max_pixels": 200704}, None]


def test_points_of_an_engine_are_chosen_by_slack_by_default():
    policies = [a_pipeline(**changes).spec.default_policy for changes in ({}, {"operatingPoints": POINTS[:1]})]

    assert policies == ["TokenAdaptive", "EarliestDeadlineFirst"]


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


PREFILL_SECONDS, IMAGE_TOKENS = {"full": 0.2, "few": 0.05}, {"full": 1024, "few": 256}
TEXT_TOKENS, ANSWER_TOKENS, TOKEN_SECONDS, PLACES, SLO_SECONDS = 60, 50, 0.02, 32, 1.0
SHOWN = json.dumps([{"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image"}]}]).encode()


def a_planned_point(name: str, speed: float = 1.0) -> dict[str, Any]:
    """A point of an engine that prefills one prompt after the other."""
    seconds = {rows: PREFILL_SECONDS[name] * rows / speed for rows in (1, 8, PLACES)}
    accuracy = next(point["accuracy"] for point in POINTS if point["name"] == name)
    return {"name": name, "accuracy": accuracy, "serviceSeconds": seconds}


class Load(Writers):
    """A scheduler of one simulated engine, planned at the last of some points, and chats with an image for it."""

    def __init__(self, names: list[str], policy: str, drop_policy: str, *, speed: float = 1.0) -> None:
        self.free_at, self.first_tokens, self.accuracies = 0.0, list[float](), list[float]()
        *upgrades, planned = (a_planned_point(name, speed) for name in names)
        pipeline, changes = a_pipeline(), {"operatingPoint": planned.pop("name"), "upgrades": upgrades}
        tokens = TEXT_TOKENS + IMAGE_TOKENS[names[-1]]
        prefill = {TEXT_TOKENS: 0.01, 1084: 0.2}
        plan = a_plan(pipeline, batchSize=PLACES, promptTokens=tokens, prefillSeconds=prefill, **planned | changes)
        self.begin(
            GenerationScheduler, pipeline.spec.stages[-1], plan.spec.stages[-1], POLICIES[policy], drop_policy, 1
        )

    def stream(self, batch: Any, wrote: Any, ended: Any) -> None:
        request, point = batch.row_slices[0].request, batch.point
        self.free_at = max(self.free_at, self.clock.now) + PREFILL_SECONDS[point.name]
        usage = Usage(TEXT_TOKENS + IMAGE_TOKENS[point.name], ANSWER_TOKENS, 0, 0, TEXT_TOKENS)

        def begin() -> None:
            self.first_tokens.append(self.clock.now - request.enqueued_at)
            self.accuracies.append(point.accuracy)
            wrote(batch, Chunk("a"))

        def end() -> None:
            wrote(batch, LastChunk("", "stop", usage))
            ended(batch, Completed((OUTPUTS,), point.name))

        self.clock.call_at(self.free_at, begin)
        self.clock.call_at(self.free_at + ANSWER_TOKENS * TOKEN_SECONDS, end)

    def send_chats(self, chats: int, chats_per_second: float, seed: int) -> tuple[float, float]:
        """Return the share of the chats in the SLO, and the mean accuracy of those served."""
        random, image = Random(seed), np.array([[b"image"]], object)
        for _ in range(chats):
            self.settle(random.expovariate(chats_per_second))
            inputs: dict[str, Array] = {"messages": np.array([SHOWN], object), "images": image}
            now = self.clock.now
            request = StageRequest(Caller(), "text", 1, inputs, deadline=now + SLO_SECONDS, now=now)
            self.scheduler.estimate_prompts(request, 1)
            refusal = self.submit(request)
            assert not isinstance(refusal, Refusal) or refusal.reason == "DeadlineUnreachable"
        self.settle(60.0)
        in_time = sum(seconds <= SLO_SECONDS for seconds in self.first_tokens)
        return in_time / chats, sum(self.accuracies) / len(self.accuracies)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["SlackFit", "TokenAdaptive"])
@pytest.mark.parametrize("drop_policy", ["Predicted", "Expired", "Never"])
def test_fewer_tokens_per_image_carry_twice_the_load(policy: str, drop_policy: str, seed: int):
    twice = 2 / PREFILL_SECONDS["full"]
    fixed, _ = Load(["full"], policy, drop_policy).send_chats(300, twice, seed)
    in_slo, accuracy = Load(["full", "few"], policy, drop_policy).send_chats(300, twice, seed)

    assert fixed <= 0.6
    assert in_slo >= 0.99
    assert accuracy >= 0.825, "a third of the chats have time for all tokens: 0.833"


def test_points_follow_an_engine_slower_than_profiled():
    in_slo, accuracy = Load(["full", "few"], "SlackFit", "Predicted", speed=1.3).send_chats(400, 8.0, 0)

    assert in_slo >= 0.99
    assert accuracy >= 0.825


def test_all_tokens_are_kept_if_time_allows():
    in_slo, accuracy = Load(["full", "few"], "SlackFit", "Predicted").send_chats(300, 1.5, 0)

    assert in_slo == 1.0
    assert accuracy >= 0.89
