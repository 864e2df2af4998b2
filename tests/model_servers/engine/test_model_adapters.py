"""Models that the engine would run wrongly are refused by name; whom it runs, it runs by public parts."""

import re
from pathlib import Path

import pytest

from tests.model_servers.engine.models import TEXT, llava, mllama_model, transformers
from trimtab_model_servers import engine
from trimtab_model_servers.engine.model_adapters import CrossAttentionAdapter, DecoderOnlyAdapter, family_of


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("MistralConfig", {"sliding_window": 16}),
        ("Gemma3TextConfig", {"head_dim": 12}),
        ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}),
    ],
)
def test_what_is_not_handled_is_refused_by_name(config, why):
    text = getattr(transformers, config)(num_hidden_layers=1, **TEXT, **why)
    model = transformers.AutoModelForCausalLM.from_config(text)

    with pytest.raises(ValueError, match=f"{text.model_type}: .* not handled"):
        family_of(model)


def test_both_ways_to_take_images_in_are_told_apart():
    assert type(family_of(llava())) is DecoderOnlyAdapter
    assert type(family_of(mllama_model())) is CrossAttentionAdapter


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_decoders_of_text_alone_are_taken(config):
    text = getattr(transformers, config)(num_hidden_layers=1, **TEXT)

    assert not family_of(transformers.AutoModelForCausalLM.from_config(text)).across


def test_no_private_part_of_transformers_is_touched():
    private = re.compile(r"(?<!self)\._[a-z]\w*")
    for path in Path(engine.__path__[0]).glob("*.py"):
        assert not private.findall(path.read_text()), path.name
