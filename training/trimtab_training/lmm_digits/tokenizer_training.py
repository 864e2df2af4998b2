"""Training of the lmm-digits tokenizer: byte-level BPE over every wording of every question."""

from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trimtab_model_servers.families.lmm_digits import CELLS
from trimtab_model_servers.families.lmm_digits.tokenizer import SPECIAL, VOCABULARY
from trimtab_training.lmm_digits.page_generator import EMPTY
from trimtab_training.lmm_digits.questions import PAGES, Kind, ask, fits


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_wordings(), trainer)
    tokenizer.encode_special_tokens = True  # a text "<|image|>" is spelled, not a placeholder
    return tokenizer


def _wordings() -> Iterator[str]:
    random = np.random.default_rng(0)
    for kind in Kind:
        for _ in range(200):
            pages = [tuple(int(cell) for cell in random.integers(EMPTY + 1, size=CELLS)) for _ in range(PAGES[kind][1])]
            if fits(kind, pages) and all(set(cells) != {EMPTY} for cells in pages):
                yield ask(kind, pages, random).text
