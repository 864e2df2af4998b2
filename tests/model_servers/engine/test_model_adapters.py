"""Model adapters: unsupported models are rejected; supported ones are run by their public members."""

import re
from pathlib import Path

import pytest

from tests.model_servers.engine.models import TEXT, llava, mllama_model, transformers
from trimtab_model_servers import engine
from trimtab_model_servers.engine.model_adapters import CrossAttentionAdapter, ModelAdapter, adapt_model


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
