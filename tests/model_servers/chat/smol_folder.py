"""A tiny SmolVLM folder: weights, a byte-pair tokenizer, and a chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tests.model_servers.chat.test_hf_vlm import a_model
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS

NAME = "smolvlm2-2.2b"
MARKS = ("<sep>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
TILE_TOKENS = 4
_CORPUS = ["User: What is this? Assistant: What this is.\n\n", "User:What\nUser: is\n\n\nAssistant: Be brief. System: "]


def a_tokenizer() -> Tokenizer:
    """A tokenizer that merges across spaces and newlines; not all markers are special, and one strips spaces."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    room = 300 - tokenizer.get_vocab_size()
    apart = AddedToken("<sep>", lstrip=True, rstrip=True, special=True)
    tokenizer.add_special_tokens(
        [apart, *MARKS[1:], *(f"<unused_{number}>" for number in range(room - len(MARKS))), "<image>"]
    )
    tokenizer.add_tokens([AddedToken(f"<row_{r}_col_{c}>", normalized=False) for r in (1, 2, 3) for c in (1, 2, 3)])
    assert tokenizer.token_to_id("<image>") == CONFIGS[NAME]("tiny").image_id
    return tokenizer


def a_folder(folder: Path, template: str | None = DEFAULT_CHAT_TEMPLATE) -> Path:
    """Write the folder."""
    a_model(NAME).save_pretrained(folder)
    a_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<end_of_utterance>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def by_processor(messages: Sequence[dict[str, Any]], pictures: Sequence[Image], template: str) -> list[int]:
    """Token ids of a chat by transformers' processor, with images."""
    tile = CONFIGS[NAME]("tiny").tile_px
    processor: Any = Idefics3Processor(
        Idefics3ImageProcessor(size={"longest_edge": 3 * tile}, max_image_size={"longest_edge": tile}),
        PreTrainedTokenizerFast(tokenizer_object=a_tokenizer(), bos_token=MARKS[4], eos_token=MARKS[3]),
        image_seq_len=TILE_TOKENS,
        chat_template=template,
    )
    text = processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    images = {"images": [list(pictures)]} if pictures else {}
    output = processor(text=text, add_special_tokens=False, return_tensors="pt", **images)
    return [int(id_) for id_ in output["input_ids"][0]]
