"""Prompts weigh by their tokens: who is due first, who could still make it, and which replica is the least loaded."""

import json

import numpy as np
import pytest

from tests.builders import a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_generation import Writers
from tests.router.test_queue import Caller
from trimtab_protocol.chat.embedding_refs import EmbeddingRef, EncodedImage, blank_image, dump_refs
from trimtab_protocol.chat.internal_wire import Chunk, Usage
from trimtab_router.scheduling.prompt_lengths import PromptFeatures, PromptLengths
from trimtab_router.scheduling.stage_request import StageRequest

HELLO, LONG = 20, 24_000
READS = {"serviceSeconds": {1: 0.1}, "promptTokens": 5.0, "prefillSeconds": {5: 0.1, 1005: 1.1}}
"""A millisecond a token beyond five."""
QUARTER = Usage(prompt=10, text=10)


class Readers(Writers):
    """Scheduler that has learnt that four bytes of text are a token."""

    def __init__(self, **given):
        super().__init__(**(READS | given))
        for _ in range(20):
            self.scheduler.prompt_lengths.learn(PromptFeatures(40), QUARTER)

    def chat(self, text_bytes, deadline):
        inputs = {"messages": np.array([b"m" * text_bytes], object)}
        work = StageRequest(Caller(), "text", 1, inputs, deadline=deadline, now=self.clock.now)
        self.scheduler.estimate_prompts(work, images=0)
        return self.submit(work)


@pytest.mark.parametrize(("joins", "tokens"), [(1.0, 100 + 640), (0.0, 100)])
def test_images_count_if_they_join_the_prompt(joins, tokens):
    prompts = PromptLengths()
    shown = PromptFeatures(text_bytes=400, images=2, image_tokens=640)
    assert prompts.tokens(shown) == 0.0

    prompts.learn(PromptFeatures(200, images=1, image_tokens=320), Usage(round(50 + joins * 320), 3, 320, 0, 50))

    assert prompts.tokens(shown) == pytest.approx(tokens)
    assert prompts.tokens(PromptFeatures(400, images=2)) == pytest.approx(tokens)
    assert prompts.tokens(PromptFeatures(400, images=2, image_tokens=1280)) == pytest.approx(100 + joins * 1280)


def test_usage_without_text_tokens_is_learned_from_text_chats():
    prompts = PromptLengths()
    prompts.learn(PromptFeatures(400), Usage(prompt=100, completion=1, text=100))
    prompts.learn(PromptFeatures(400, images=2), Usage(prompt=700, completion=1))
    prompts.learn(PromptFeatures(400), Usage())

    assert prompts.tokens(PromptFeatures(400)) == pytest.approx(100)
    assert prompts.tokens(PromptFeatures(400, images=1)) == pytest.approx(400)


@pytest.mark.parametrize("separators", [(",", ":"), None])
def test_long_chat_is_predicted_from_short_ones(separators):
    def shown(text, images=0):
        content = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
        messages = json.dumps([{"role": "user", "content": content}], separators=separators)
        return PromptFeatures.from_messages(np.array([messages.encode()], object), 0, images)

    prompts = PromptLengths()
    prompts.learn(shown("What is seven plus five?"), Usage(prompt=6, completion=1, text=6))

    assert prompts.tokens(shown("word " * 6_000)) == pytest.approx(7_500, rel=0.4)
    assert shown("", images=2).text_bytes <= 15
    assert shown('{"role": "user"} {"type": "image"}').text_bytes >= 34  # text that spells JSON is text


def test_embeddings_are_counted_from_references():
    def referring(row):
        return {"messages": np.array([b"{}"], object), "references": np.array([row], object)}

    row = dump_refs([blank_image(EncodedImage(rows=7)), EmbeddingRef(url="blank:", rows=5)])
    assert PromptFeatures.from_inputs(referring(row), 0, images=2) == PromptFeatures(2, 2, 12)
    assert PromptFeatures.from_inputs(referring(json.dumps([{}]).encode()), 0, images=1) == PromptFeatures(2, 1, None)
    assert PromptFeatures.from_inputs({"messages": np.array([b"{}"], object)}, 0, images=2) == PromptFeatures(2)
    assert PromptFeatures.from_inputs({"x": np.zeros(1)}, 0, images=0) is None


def test_longer_prompt_goes_first_at_equal_deadlines():
    top = Readers(places=1)
    first = top.chat(HELLO, deadline=100.0)
    short, long = top.chat(HELLO, deadline=50.0), top.chat(LONG, deadline=52.0)
    assert [batch.row_slices[0].request for batch in top.sent] == [first]
    assert (long.prefill_seconds, long.due_at) == (pytest.approx(5.995), pytest.approx(52.0 - 5.995))

    top.end(top.sent[0])
    top.settle()
    assert [batch.row_slices[0].request for batch in top.sent] == [long]
    top.end(top.sent[0])
    top.settle()
    assert [batch.row_slices[0].request for batch in top.sent] == [short]


def test_prompt_that_cannot_be_in_time_is_dropped_early():
    top = Readers(places=1)
    top.chat(HELLO, deadline=100.0)
    short, long = top.chat(HELLO, deadline=5.0), top.chat(LONG, deadline=7.0)
    top.settle(1.5)

    assert short.owner.refusal is None
    assert long.owner.refusal.reason == "DeadlineUnreachable"
    assert "6.095 s in this stage" in long.owner.refusal.message


def test_chat_goes_to_replica_with_fewest_pending_tokens():
    top = Readers(slots=2, places=4)
    one, other = top.slots
    long = top.chat(400, deadline=100.0)
    assert (one.pending_tokens, other.pending_tokens) == (100.0, 0.0)
    for _ in range(3):
        top.chat(HELLO, deadline=100.0)

    assert (one.inflight, other.inflight) == (1, 3)
    assert other.pending_tokens == 15.0
    batch = next(batch for batch in top.sent if batch.row_slices[0].request is long)
    top.wrote(batch, Chunk("a"))  # its prompt is read: from now on it takes a token of each step
    assert one.pending_tokens == 1.0
    top.chat(HELLO, deadline=100.0)
    assert one.inflight == 2
    for batch in top.sent:
        top.end(batch)
    assert (one.pending_tokens, other.pending_tokens) == (0.0, 0.0)


def test_long_prompt_does_not_slow_the_latency_model():
    top = Readers(places=1)
    top.chat(LONG, deadline=1000.0)
    (batch,) = top.sent
    top.settle(6.095)
    top.wrote(batch, Chunk("a"))

    assert top.scheduler.latency_model.service_ratio == pytest.approx(1.0)
    assert [call[3] for call in top.stats_calls if call[0] == "observe_batch"] == [pytest.approx(6.095)]


def test_short_prompt_is_never_predicted_below_zero():
    top = Readers(promptTokens=1005.0, serviceSeconds={1: 0.2})

    seconds = top.scheduler.latency_model.service_seconds(1)
    assert top.chat(HELLO, deadline=10.0).prefill_seconds == pytest.approx(-seconds)


@pytest.mark.parametrize("unknown", [{"prefillSeconds": {}}, {"prefillSeconds": {}, "promptTokens": 0.0}])
def test_without_profile_all_prompts_weigh_the_same(unknown):
    pipeline = a_chat_pipeline([a_writer(variants=[a_variant(), a_variant("other")])])
    work = Readers(pipeline=pipeline, **unknown).chat(LONG, deadline=10.0)

    assert (work.prefill_seconds, work.due_at) == (0.0, 10.0)
