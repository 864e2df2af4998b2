"""What is trained is what `generate` runs and what the engine serves, and what is saved comes back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, END_ID, IMAGE_ID, WeightsError
from trimtab_model_servers.families.lmm_digits.tokenizer import read_tokenizer
from trimtab_training.lmm_digits import evaluate, train, train_loops
from trimtab_training.lmm_digits.batches import Batch, Questioner, character_ids
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import Kind
from trimtab_training.lmm_digits.tokenizer_training import train_tokenizer
from trimtab_training.lmm_digits.train_loops import Answering, Schedule

TOKENIZER = train_tokenizer()
EXERCISES = [
    exercise
    for kind in (Kind.READ_PAGE, Kind.COUNT, Kind.SUM)
    for exercise in evaluate.exercises(kind, 3, CellPageSource("held-out", 22))
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request) -> tuple[str, Any]:
    return request.param, models.for_serving(models.build(request.param, seed=1))


def pixels_of(exercise: evaluate.Exercise) -> torch.Tensor:
    return torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))


def test_training_computes_the_logits_that_generate_computes(model):
    architecture, network = model
    for exercise in EXERCISES:
        inputs = evaluate.generate_inputs(architecture, TOKENIZER, exercise)
        pages = len(exercise.pages)
        tower = models.tower(network)
        seen = tower.features(pixels_of(exercise)) if pages else torch.zeros(1, 16, models.WIDTH)
        learner = Answering(network, architecture, tower, seen, character_ids(TOKENIZER))
        nothing = torch.zeros(0)
        batch = Batch(
            inputs["input_ids"],
            nothing,
            torch.zeros(1, pages, 4, dtype=torch.int64),
            torch.arange(pages)[None],
            nothing,
        )
        with torch.inference_mode():
            torch.testing.assert_close(learner.logits(batch), network(**inputs).logits)


def test_the_engine_answers_what_generate_answers(model):
    architecture, alone = model
    served = models.for_serving(models.build(architecture, seed=1))

    said = evaluate.answer_all(served, architecture, TOKENIZER, EXERCISES)

    assert said == [evaluate.answer(alone, architecture, TOKENIZER, exercise) for exercise in EXERCISES]


def test_a_batch_asks_for_the_answer_and_its_end_at_the_right_places():
    cells = np.array([[7, 10, 4, 3], [1, 10, 10, 10]])
    questioner = Questioner(TOKENIZER, cells, page_tokens=1, seed=1)
    for _ in range(12):
        batch = questioner.batch(4, twins=0.5)
        for ids, labels, hints in zip(batch.ids, batch.labels, batch.hints, strict=True):
            at = (labels >= 0).nonzero().flatten()
            assert labels[at].tolist() == ids[at + 1].tolist()
            assert labels[at[-1]] == END_ID
            said = TOKENIZER.decode(ids.tolist())
            there = any(words in said for words in ("Is there a", "Do you see", "Read page", "What does page"))
            assert (hints >= 0).sum() == 4 * batch.drawn.shape[1] + there


def test_the_whole_training_runs_and_what_it_writes_is_measured(tmp_path: Path, monkeypatch):
    short = Schedule(steps=2, batch=4, peak_rate=1e-3, seed=1)
    monkeypatch.setattr(train, "TRAINING_PAGES", 40)
    monkeypatch.setattr(train, "TOWER", short)
    monkeypatch.setattr(train, "ALIGNING", short)
    monkeypatch.setattr(train, "ANSWERING", dict.fromkeys(ARCHITECTURES, short))
    monkeypatch.setattr(evaluate, "ASKED_OF_EACH_KIND", 1)

    assert train.main(["-o", str(tmp_path)]) == 0

    for architecture in ARCHITECTURES:
        loaded = models.load(tmp_path / "weights" / f"{architecture}.safetensors")
        assert loaded.architecture == architecture
        assert not loaded.model.training
    beside = read_tokenizer((tmp_path / "weights" / "tokenizer.json").read_text())
    assert beside.get_vocab_size() == TOKENIZER.get_vocab_size()
    assert (tmp_path / "accuracy.json").read_text().count('"low"') == 2 * (1 + len(Kind))


def test_weights_of_something_else_are_refused_by_name(tmp_path: Path):
    (tmp_path / "other.safetensors").write_bytes(b"no weights")

    with pytest.raises(WeightsError, match=r"cannot use the weights in .*other\.safetensors"):
        models.load(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match="trains them anew"):
        models.load(tmp_path / "missing.safetensors")


def test_a_page_is_seen_from_its_placeholder_up_to_the_next():
    ids = torch.tensor([[9, IMAGE_ID, 9, IMAGE_ID, 9]])

    hidden, some = train_loops.across_mask(ids, 2)

    assert (hidden[0, 0, :, ::16] == 0).tolist() == [
        [True, True],
        [True, False],
        [True, False],
        [False, True],
        [False, True],
    ]
    assert some.flatten().tolist() == [0, 1, 1, 1, 1]
