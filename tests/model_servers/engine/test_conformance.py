"""The engine writes, token for token, what transformers' own `generate` writes with the model run alone (fp32)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.model_servers.engine.models import Asked, LlavaRequests, MllamaRequests, llava, mllama_model
from trimtab_model_servers.engine.core import EngineCore, Event
from trimtab_model_servers.engine.cuda_graphs import Step
from trimtab_model_servers.engine.model_adapters import family_of
from trimtab_model_servers.engine.request import FinishReason, RequestDone, TokenChunk
from trimtab_model_servers.engine.scheduler import Limits

LIMITS = Limits(slots=6, slot_tokens=96, step_tokens=11, image_tokens=40)  # chunks end inside images
REQUESTS = 60


@pytest.fixture(scope="module", params=["decoder-only", "cross-attention"])
def family(request) -> tuple[Any, Any, type]:
    """The model alone, the same one under the engine, and who asks."""
    make, requests = (llava, LlavaRequests) if request.param == "decoder-only" else (mllama_model, MllamaRequests)
    return make(), family_of(make()), requests


class Heard:
    """What a caller was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[RequestDone] = []

    def __call__(self, event: Event) -> None:
        assert not self.ends, "told something after the last word"
        if isinstance(event, TokenChunk):
            self.tokens.append(event.token)
        else:
            self.ends.append(event)


def written_alone(alone: Any, one: Asked, count: int) -> list[int]:
    """So many tokens, whatever would end an answer."""
    wrote = alone.generate(**one.generate, max_new_tokens=count, min_new_tokens=count)
    return [int(token) for token in wrote[0, one.generate["input_ids"].shape[1] :]]


class Again:
    """Records as a card does, but on cores: what a step made lasts until the next one."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Step) -> Step:
        made = step()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return made.copy_(step())

        return replay


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("recorded", [False, True])
def test_requests_of_different_ages_with_cancels_between_are_answered_as_alone(family, share_prefixes, recorded):
    alone, served, requests = family
    drawn, random = requests(alone, seed=5), np.random.default_rng(7)
    again = Again()
    core = EngineCore(served, LIMITS, share_prefixes=share_prefixes, recorder=again if recorded else None)
    asked, heard = {}, {}
    cached = 0
    for number in range(REQUESTS):
        name = f"r{number}"
        asked[name], heard[name] = drawn.draw(name), Heard()
        core.submit(asked[name].request, asked[name].images, heard[name])
        for _ in range(int(random.integers(4))):
            core.step()
        if random.random() < 0.2:
            core.cancel(f"r{max(0, number - int(random.integers(8)))}")
    while core.step():
        pass

    assert all(len(ears.ends) == 1 for ears in heard.values())
    for name, ears in heard.items():
        wanted = asked[name].oracle(alone)
        cancelled = ears.ends[0].ending is FinishReason.CANCELLED
        assert ears.tokens == (wanted[: len(ears.tokens)] if cancelled else wanted), name
        cached += ears.ends[0].usage.cached
    assert sum(ears.ends[0].ending is FinishReason.CANCELLED for ears in heard.values()) > 3
    assert cached > 40 if share_prefixes else cached == 0
    assert again.replayed > 2 * again.recorded > 0 if recorded else again.recorded == 0
    assert core.gauges.running == core.gauges.held == core.gauges.busy_slots == core.gauges.pending_tokens == 0


def test_the_prompt_is_computed_up_to_an_image_that_is_still_encoded(family):
    alone, served, requests = family
    drawn = requests(alone, seed=11)
    asked = next(one for number in range(99) if len((one := drawn.draw(f"r{number}")).images) == 2)
    core, heard = EngineCore(served, LIMITS), Heard()

    core.submit(asked.request, [None, None], heard)
    while core.step():
        pass
    before = core.gauges.pending_tokens
    core.supply(asked.request.id, {0: asked.images[0]})
    while core.step():
        pass
    between = core.gauges.pending_tokens
    core.supply(asked.request.id, {1: asked.images[1]})
    while core.step():
        pass

    prompt = len(asked.request.tokens)
    first, second = (image.start for image in asked.request.images)
    assert (before, between) == ((prompt, prompt) if served.across else (prompt - first, prompt - second))
    assert heard.tokens == asked.oracle(alone)


@pytest.mark.parametrize("recorded", [False, True])
def test_long_answers_written_side_by_side_while_others_come_and_end_are_those_of_each_alone(family, recorded):
    alone, served, requests = family
    drawn, heard = requests(alone, seed=13), {}
    limits = Limits(slots=6, slot_tokens=260, step_tokens=40, image_tokens=40)
    core = EngineCore(served, limits, recorder=Again() if recorded else None)
    asked = {f"r{number}": drawn.draw(f"r{number}") for number in range(6)}
    lengths = dict(zip(asked, (150, 20, 90, 150, 10, 120), strict=True))
    for number, (name, one) in enumerate(asked.items()):
        written = lengths[name]
        heard[name] = Heard()
        core.submit(replace(one.request, max_new_tokens=written, min_new_tokens=written), one.images, heard[name])
        for _ in range(3 * number):
            core.step()
    while core.step():
        pass

    for name, ears in heard.items():
        one, written = asked[name], lengths[name]
        assert ears.tokens == written_alone(alone, one, written), name


def test_steps_are_recorded_before_anybody_waits_and_only_those_about_images_later(family):
    alone, served, requests = family
    drawn, again = requests(alone, seed=23), Again()
    core = EngineCore(served, Limits(slots=2, slot_tokens=1000, step_tokens=40, image_tokens=40), recorder=again)
    at_start = again.recorded  # of 256, 512 and 1000 positions
    for images in (0, 1):
        asked = next(one for number in range(99) if bool((one := drawn.draw(f"{images}.{number}")).images) == images)
        core.submit(replace(asked.request, min_new_tokens=4, max_new_tokens=4), asked.images, Heard())
        while core.step():
            pass

    assert (at_start, again.recorded, again.replayed) == (3, 4 if served.across else 3, 6)


def test_where_steps_cannot_be_recorded_each_is_started_anew(family, caplog):
    alone, served, requests = family
    asked, heard, tried = requests(alone, seed=19).draw("r"), Heard(), 0

    def refuse(step: Step) -> Step:
        nonlocal tried
        tried += 1
        raise RuntimeError("not here")

    core = EngineCore(served, LIMITS, recorder=refuse)
    core.submit(replace(asked.request, min_new_tokens=4, max_new_tokens=4), asked.images, heard)
    while core.step():
        pass

    assert heard.tokens == written_alone(alone, asked, 4)
    assert (tried, heard.ends[0].ending) == (1, FinishReason.LENGTH)
    assert "each is started anew" in caplog.text
