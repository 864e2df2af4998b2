"""Shipped weights of lmm-digits: accuracy, size and tokenizer."""

from pathlib import Path

import pytest

from tests.lmm_digits_answers import Exercise, answer, answer_all, draw_exercises
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES
from trimtab_model_servers.families.lmm_digits.tokenizer import read_tokenizer
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import EvaluationChats, Kind, Question

FOLDER = Path(__file__).parents[3] / "pipelines" / "lmm-digits"
STATED = {variant.name: variant for variant in load_pipeline(FOLDER).spec.stages[0].variants}
MAX_WEIGHT_BYTES = 12_000_000
EXERCISES = 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_measured_accuracies_reach_the_bar(architecture):
    assert STATED[architecture].accuracy >= 0.9
    assert STATED[architecture].accuracy_evidence.samples == 500 * len(Kind)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_reach_the_measured_accuracy(architecture):
    loaded = models.load(FOLDER / "weights" / f"{architecture}.safetensors")
    source = CellPageSource("held-out", 123)
    exercises = [exercise for kind in Kind for exercise in draw_exercises(kind, EXERCISES, source, seed=123)]

    answers = answer_all(loaded.model, architecture, loaded.tokenizer, exercises)

    right = sum(text == exercise.question.answer for text, exercise in zip(answers, exercises, strict=True))
    assert right / len(exercises) >= STATED[architecture].accuracy - 0.08


def test_evaluation_chats_match_the_pipeline():
    samples = LabelledPayloads(load_pipeline(FOLDER), f"{EvaluationChats.__module__}:{EvaluationChats.__name__}")
    count = len(samples)
    payloads = [samples.payload(number) for number in range(40)]

    assert count == 500 * len(Kind)
    assert len(samples.tasks(count)) == len(Kind)
    assert {payload.images for payload in payloads} == {0, 1, 2, 3}
    assert all(payload.inputs[0].array.shape == (1,) for payload in payloads)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_sum_in_every_wording_is_right(architecture):
    loaded = models.load(FOLDER / "weights" / f"{architecture}.safetensors")
    wordings = ("{}+{}=", "What is {}+{}?", "What is {} + {}?", "What is {} plus {}?")
    sums = [(wording, first, second) for wording in wordings for first in range(10) for second in range(10)]
    exercises = [Exercise(Question(Kind.SUM, w.format(a, b), str(a + b)), ()) for w, a, b in sums]

    answers = answer_all(loaded.model, architecture, loaded.tokenizer, exercises)

    wrong = {e.question.text: text for e, text in zip(exercises, answers, strict=True) if text != e.question.answer}
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engine_answers_equal_those_of_generate(architecture):
    alone, served = (models.load(FOLDER / "weights" / f"{architecture}.safetensors") for _ in range(2))
    source = CellPageSource("held-out", 17)
    exercises = [exercise for kind in Kind for exercise in draw_exercises(kind, 5, source, seed=17)]

    answers = answer_all(served.model, architecture, served.tokenizer, exercises)

    assert answers == [answer(alone.model, architecture, alone.tokenizer, exercise) for exercise in exercises]


def test_weights_are_small_and_tokenizer_file_matches():
    files = list((FOLDER / "weights").iterdir())
    vocabulary = read_tokenizer((FOLDER / "weights" / "tokenizer.json").read_text()).get_vocab()

    assert sum(file.stat().st_size for file in files) <= MAX_WEIGHT_BYTES
    for architecture in ARCHITECTURES:
        assert models.load(FOLDER / "weights" / f"{architecture}.safetensors").tokenizer.get_vocab() == vocabulary
