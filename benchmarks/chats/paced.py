"""A small random model whose steps take tens of milliseconds on a CPU, as a large model's do on a GPU."""

from pathlib import Path
from typing import Any, Final

import torch

from trimtab_model_servers.families.hf_vlm.chat_tokenizer import byte_tokenizer
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS, VlmConfig

NAME: Final = "llava-onevision-7b"
WIDTH, LAYERS, HEADS = 384, 3, 8
END_MARKS: Final = ("<|im_end|>", "<|eot_id|>")


def write_model(folder: Path) -> str:
    """Write the model in the layout of its publisher and return its family."""
    shape = CONFIGS[NAME]("tiny")
    config: Any = shape.model().config
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = WIDTH, 3 * WIDTH, LAYERS
    text.num_attention_heads = text.num_key_value_heads = HEADS
    text.layer_types = LAYERS * ["full_attention"]
    _save(shape, config, folder)
    return f"{NAME}/colocated"


def _save(shape: VlmConfig, config: Any, folder: Path) -> None:
    """Write random weights and a byte tokenizer; each generated token is a printable ASCII character."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = shape.model_class(config)
    with torch.no_grad():
        model.lm_head.weight[: ord(" ")] = 0.0
        model.lm_head.weight[ord("~") :] = 0.0
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(shape.image_id - 20)
    tokenizer.add_special_tokens(list(END_MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
