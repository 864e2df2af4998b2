"""Conformance: the engine generates what transformers' `generate` does (FP32), and rejects unsupported models."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.model_servers.engine.models import (
    TEXT,
    LlavaRequests,
    MllamaRequests,
    complete,
    llava,
    mllama_model,
    transformers,
)
from trimtab_model_servers import engine
from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.cuda_graphs import StepFunction
from trimtab_model_servers.engine.model_adapters import CrossAttentionAdapter, ModelAdapter, adapt_model
from trimtab_model_servers.engine.request import FinishReason, RequestDone, TokenChunk
from trimtab_model_servers.engine.scheduler import EngineLimits

LIMITS = EngineLimits(slots=6, slot_tokens=96, step_tokens=11, image_tokens=40)  # chunks end inside images
REQUESTS = 60


@pytest.fixture(scope="module", params=["decoder-only", "cross-attention"])
def family(request) -> tuple[Any, Any, type]:
    """The model alone, its adapter, and its request generator."""
    make, requests = (llava, LlavaRequests) if request.param == "decoder-only" else (mllama_model, MllamaRequests)
    return make(), adapt_model(make()), requests


class Listener:
    """Events of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[RequestDone] = []

    def __call__(self, event: EngineEvent) -> None:
        assert not self.ends, "an event after the last one"
        if isinstance(event, TokenChunk):
            self.tokens.append(event.token)
        else:
            self.ends.append(event)


class FakeCapture:
    """Captures steps like CUDA graphs, on the CPU: an output is valid until the next step."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: StepFunction) -> StepFunction:
        made = step()
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return made.copy_(step())

        return replay


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("with_graphs", [False, True])
def test_concurrent_requests_with_cancellations_equal_generate(family, share_prefixes, with_graphs):
    alone, served, requests = family
    drawn, random = requests(alone, seed=5), np.random.default_rng(7)
    capture = FakeCapture()
    core = EngineCore(served, LIMITS, share_prefixes=share_prefixes, graph_capture=capture if with_graphs else None)
    asked, heard = {}, {}
    cached = 0
    for number in range(REQUESTS):
        name = f"r{number}"
        asked[name], heard[name] = drawn.draw(name), Listener()
        core.submit(asked[name].request, asked[name].images, heard[name])
        for _ in range(int(random.integers(4))):
            core.step()
        if random.random() < 0.2:
            core.cancel(f"r{max(0, number - int(random.integers(8)))}")
    complete(core)

    assert all(len(ears.ends) == 1 for ears in heard.values())
    for name, ears in heard.items():
        wanted = asked[name].oracle(alone)
        cancelled = ears.ends[0].finish_reason is FinishReason.CANCELLED
        assert ears.tokens == (wanted[: len(ears.tokens)] if cancelled else wanted), name
        cached += ears.ends[0].usage.cached
    assert sum(ears.ends[0].finish_reason is FinishReason.CANCELLED for ears in heard.values()) > 3
    assert cached > 40 if share_prefixes else cached == 0
    assert capture.replayed > 2 * capture.captured > 0 if with_graphs else capture.captured == 0
    assert (
        core.gauges.running == core.gauges.stored_requests == core.gauges.busy_slots == core.gauges.pending_tokens == 0
    )


def test_prompt_is_computed_up_to_a_pending_image(family):
    alone, served, requests = family
    drawn = requests(alone, seed=11)
    asked = next(one for number in range(99) if len((one := drawn.draw(f"r{number}")).images) == 2)
    core, heard = EngineCore(served, LIMITS), Listener()

    core.submit(asked.request, [None, None], heard)
    complete(core)
    before = core.gauges.pending_tokens
    core.add_embeddings(asked.request.id, {0: asked.images[0]})
    complete(core)
    between = core.gauges.pending_tokens
    core.add_embeddings(asked.request.id, {1: asked.images[1]})
    complete(core)

    prompt = len(asked.request.tokens)
    first, second = (image.start for image in asked.request.images)
    assert (before, between) == ((prompt, prompt) if served.cross_attention else (prompt - first, prompt - second))
    assert heard.tokens == asked.oracle(alone)


@pytest.mark.parametrize("with_graphs", [False, True])
def test_long_concurrent_outputs_equal_generate(family, with_graphs):
    alone, served, requests = family
    drawn, heard = requests(alone, seed=13), {}
    limits = EngineLimits(slots=6, slot_tokens=260, step_tokens=40, image_tokens=40)
    core = EngineCore(served, limits, graph_capture=FakeCapture() if with_graphs else None)
    asked = [drawn.draw(f"r{number}").exactly(tokens) for number, tokens in enumerate((150, 20, 90, 150, 10, 120))]
    for number, one in enumerate(asked):
        heard[one.request.id] = Listener()
        core.submit(one.request, one.images, heard[one.request.id])
        for _ in range(3 * number):
            core.step()
    complete(core)

    for one in asked:
        assert heard[one.request.id].tokens == one.oracle(alone), one.request.id


def test_text_only_graphs_are_captured_at_start(family):
    alone, served, requests = family
    drawn, capture = requests(alone, seed=23), FakeCapture()
    limits = EngineLimits(slots=2, slot_tokens=1000, step_tokens=40, image_tokens=40)
    core = EngineCore(served, limits, graph_capture=capture)
    at_start = capture.captured  # of 256, 512 and 1000 positions
    for images in (0, 1):
        asked = next(one for number in range(99) if bool((one := drawn.draw(f"{images}.{number}")).images) == images)
        core.submit(asked.exactly(4).request, asked.images, Listener())
        complete(core)

    assert (at_start, capture.captured, capture.replayed) == (3, 4 if served.cross_attention else 3, 6)


def test_failed_capture_falls_back_to_plain_steps(family, caplog):
    alone, served, requests = family
    asked, heard, tried = requests(alone, seed=19).draw("r").exactly(4), Listener(), 0

    def refuse(step: StepFunction) -> StepFunction:
        nonlocal tried
        tried += 1
        raise RuntimeError("not here")

    core = EngineCore(served, LIMITS, graph_capture=refuse)
    core.submit(asked.request, asked.images, heard)
    complete(core)

    assert heard.tokens == asked.oracle(alone)
    assert (tried, heard.ends[0].finish_reason) == (1, FinishReason.LENGTH)
    assert "CUDA graph capture failed" in caplog.text


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("MistralConfig", {"sliding_window": 16}),
        ("Gemma3TextConfig", {"head_dim": 12}),
        ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}),
    ],
)
def test_unsupported_attention_is_rejected_by_name(config, why):
    text = getattr(transformers, config)(num_hidden_layers=1, **TEXT, **why)
    model = transformers.AutoModelForCausalLM.from_config(text)

    with pytest.raises(ValueError, match=f"{text.model_type}: .* not supported"):
        adapt_model(model)


def test_adapter_follows_the_models_image_attention():
    assert type(adapt_model(llava())) is ModelAdapter
    assert type(adapt_model(mllama_model())) is CrossAttentionAdapter


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_text_only_decoders_are_supported(config):
    text = getattr(transformers, config)(num_hidden_layers=1, **TEXT)

    assert not adapt_model(transformers.AutoModelForCausalLM.from_config(text)).cross_attention


def test_engine_uses_no_private_members_of_transformers():
    private = re.compile(r"(?<!self)\._[a-z]\w*")
    for path in Path(engine.__path__[0]).glob("*.py"):
        assert not private.findall(path.read_text()), path.name
