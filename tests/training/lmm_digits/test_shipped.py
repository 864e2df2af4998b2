"""Shipped weights of lmm-digits: accuracy, size and tokenizer."""

import json
from pathlib import Path

import pytest

from tests.transformers_generate import answer
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_model_servers.families.lmm_digits.tokenizer import read_tokenizer
from trimtab_training.lmm_digits import evaluate
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import Kind, Question

FOLDER = Path(__file__).parents[3] / "pipelines" / "lmm-digits"
MEASURED = json.loads((FOLDER / "accuracy.json").read_text())["variants"]
MAX_WEIGHT_BYTES = 12_000_000
EXERCISES = 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_measured_accuracies_reach_the_bar(architecture):
    measured = MEASURED[architecture]

    assert measured["accuracy"] >= 0.9
    assert {kind: entry["n"] for kind, entry in measured["kinds"].items()} == dict.fromkeys(Kind, 500)
    assert {kind: entry["accuracy"] for kind, entry in measured["kinds"].items() if entry["accuracy"] < 0.85} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_reach_the_measured_accuracy(architecture):
    loaded = models.load(FOLDER / "weights" / f"{architecture}.safetensors")
    source = CellPageSource("held-out", 123)
    by_kind = {kind: evaluate.draw_exercises(kind, EXERCISES, source, seed=123) for kind in Kind}

    report = evaluate.measure(loaded.model, architecture, loaded.tokenizer, by_kind, lambda _: None)

    assert report["accuracy"] >= MEASURED[architecture]["accuracy"] - 0.08


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_sum_in_every_wording_is_right(architecture):
    loaded = models.load(FOLDER / "weights" / f"{architecture}.safetensors")
    wordings = ("{}+{}=", "What is {}+{}?", "What is {} + {}?", "What is {} plus {}?")
    sums = [(wording, first, second) for wording in wordings for first in range(10) for second in range(10)]
    exercises = [evaluate.Exercise(Question(Kind.SUM, w.format(a, b), str(a + b)), ()) for w, a, b in sums]

    answers = evaluate.answer_all(loaded.model, architecture, loaded.tokenizer, exercises)

    wrong = {e.question.text: text for e, text in zip(exercises, answers, strict=True) if text != e.question.answer}
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engine_answers_equal_those_of_generate(architecture):
    alone, served = (models.load(FOLDER / "weights" / f"{architecture}.safetensors") for _ in range(2))
    source = CellPageSource("held-out", 17)
    exercises = [exercise for kind in Kind for exercise in evaluate.draw_exercises(kind, 5, source, seed=17)]

    answers = evaluate.answer_all(served.model, architecture, served.tokenizer, exercises)

    assert answers == [answer(alone.model, architecture, alone.tokenizer, exercise) for exercise in exercises]


def test_weights_are_small_and_tokenizer_file_matches():
    files = list((FOLDER / "weights").iterdir())
    vocabulary = read_tokenizer((FOLDER / "weights" / "tokenizer.json").read_text()).get_vocab()

    assert sum(file.stat().st_size for file in files) <= MAX_WEIGHT_BYTES
    for architecture in ARCHITECTURES:
        assert models.load(FOLDER / "weights" / f"{architecture}.safetensors").tokenizer.get_vocab() == vocabulary
