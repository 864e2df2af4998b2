"""The shipped weights: each kind of question is answered as well as measured, by ``generate`` and in the engine."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.engine import trained
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_model_servers.families.lmm_digits.tokenizer import read_tokenizer
from trimtab_training.lmm_digits import evaluate
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import Kind

FOLDER = Path(__file__).parents[3] / "pipelines" / "lmm-digits"
MEASURED = json.loads((FOLDER / "accuracy.json").read_text())["variants"]
MOST_WEIGHT_BYTES = 12_000_000
ASKED = 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_was_measured_is_what_was_promised(architecture):
    measured = MEASURED[architecture]

    assert measured["accuracy"] >= 0.9
    assert {kind: found["n"] for kind, found in measured["kinds"].items()} == dict.fromkeys(Kind, 500)
    assert {kind: found["accuracy"] for kind, found in measured["kinds"].items() if found["accuracy"] < 0.85} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_questions_of_every_kind_are_answered(architecture):
    stored = models.load(FOLDER / "weights" / f"{architecture}.safetensors")
    source = CellPageSource("held-out", 123)
    asked = {kind: evaluate.exercises(kind, ASKED, source, seed=123) for kind in Kind}

    found = evaluate.measure(stored.model, architecture, stored.tokenizer, asked, lambda _: None)

    assert found["accuracy"] >= MEASURED[architecture]["accuracy"] - 0.08


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_writes_what_generate_writes(architecture):
    torch.set_num_threads(1)
    compared = trained.identity(trained.Trained(architecture), 40, lambda: None)

    assert compared.differing == 0
    assert compared.cancelled
    if architecture == "decoder-only":  # the other's prompts are a dozen tokens, of which so few chats share none
        assert compared.reused_tokens


def test_the_weights_are_small_and_their_tokenizer_lies_beside_them():
    files = list((FOLDER / "weights").iterdir())
    beside = read_tokenizer((FOLDER / "weights" / "tokenizer.json").read_text()).get_vocab()

    assert sum(file.stat().st_size for file in files) <= MOST_WEIGHT_BYTES
    for architecture in ARCHITECTURES:
        assert models.load(FOLDER / "weights" / f"{architecture}.safetensors").tokenizer.get_vocab() == beside
