"""Checkpoints of IPA's variants in their published sizes with random weights: the latency is right, answers are not.

Tokenizers and processors are those of miniatures. Generated texts have the mean length of published data sets.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from trimtab_model_servers.families.hf.miniatures import TOKENS, write_miniature
from trimtab_model_servers.families.transformers_package import TRANSFORMERS as HF
from trimtab_pipelines.variants import Variant

SPECIAL_TOKENS = {name: token for name, token in TOKENS.items() if name != "vocab_size"}
IMAGES = {"input_size": [3, 224, 224], "crop_pct": 0.875, "num_classes": 1000}


@cache
def sizes() -> dict[str, dict[str, Any]]:
    """Class and settings by variant."""
    variants: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["variants"]
    return variants


def network(variant: str) -> Any:
    """The network of a variant, with random weights."""
    settings = sizes()[variant]
    model_class = getattr(HF, settings["class"])
    further = {"pretrained_cfg": IMAGES, "num_labels": 1000} if "architecture" in settings else SPECIAL_TOKENS
    stated = {name: value for name, value in settings.items() if name not in {"class", "generate"}}
    return model_class(model_class.config_class(**further, **stated))


def write_checkpoint(variant: Variant, folder: Path) -> None:
    """Write a variant's checkpoint, with weights in BF16 to save space."""
    write_miniature(variant.family, variant.storage_uri, folder)
    model = network(variant.name).to(torch.bfloat16)
    if "generate" in sizes()[variant.name]:
        tokens, beams = sizes()[variant.name]["generate"]
        model.generation_config.update(min_new_tokens=tokens, max_new_tokens=tokens, num_beams=beams)
    if "backbone_config" in sizes()[variant.name]:
        HF.RTDetrImageProcessor().save_pretrained(folder)
    vocabulary = folder / "vocab.json"
    if vocabulary.exists():  # every token that is generated has a text
        known = json.loads(vocabulary.read_text())
        further = range(len(known), model.config.vocab_size)
        vocabulary.write_text(json.dumps(known | {f"\u2581{number}": number for number in further}))
    model.save_pretrained(folder)
