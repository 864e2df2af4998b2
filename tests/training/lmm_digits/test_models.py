"""Models of lmm-digits: training, `generate` and the engine compute the same; weights load as saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.lmm_digits_answers import Exercise, draw_exercises, generate_inputs
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, END_ID, IMAGE_ID
from trimtab_model_servers.families.lmm_digits.tokenizer import load_default_tokenizer, read_tokenizer
from trimtab_training.lmm_digits import train
from trimtab_training.lmm_digits.batches import Batch, Questioner, character_ids
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import Kind
from trimtab_training.lmm_digits.train import AnswerTraining
from trimtab_training.trainer import Schedule

TOKENIZER = load_default_tokenizer()
EXERCISES = [
    exercise
    for kind in (Kind.READ_PAGE, Kind.COUNT, Kind.SUM)
    for exercise in draw_exercises(kind, 3, CellPageSource("held-out", 22))
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request) -> tuple[str, Any]:
    return request.param, models.prepare_for_serving(models.build(request.param, seed=1))


def pixels_of(exercise: Exercise) -> torch.Tensor:
    return torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))


def test_training_logits_equal_those_of_the_model(model):
    architecture, network = model
    for exercise in EXERCISES:
        inputs = generate_inputs(architecture, TOKENIZER, exercise)
        pages = len(exercise.pages)
        tower = models.tower(network)
        features = tower.features(pixels_of(exercise)) if pages else torch.zeros(1, 16, models.WIDTH)
        training = AnswerTraining(network, architecture, tower, features, character_ids(TOKENIZER))
        empty = torch.zeros(0)
        batch = Batch(
            inputs["input_ids"], empty, torch.zeros(1, pages, 4, dtype=torch.int64), torch.arange(pages)[None], empty
        )
        with torch.inference_mode():
            torch.testing.assert_close(training.logits(batch), network(**inputs).logits)


def test_batch_labels_are_the_answer_and_its_end():
    cells = np.array([[7, 10, 4, 3], [1, 10, 10, 10]])
    questioner = Questioner(TOKENIZER, cells, page_tokens=1, seed=1)
    for _ in range(12):
        batch = questioner.batch(4, twins=0.5)
        for ids, labels, hints in zip(batch.ids, batch.labels, batch.hints, strict=True):
            positions = (labels >= 0).nonzero().flatten()
            assert labels[positions].tolist() == ids[positions + 1].tolist()
            assert labels[positions[-1]] == END_ID
            text = TOKENIZER.decode(ids.tolist())
            has_position_hint = any(
                words in text for words in ("Is there a", "Do you see", "Read page", "What does page")
            )
            assert (hints >= 0).sum() == 4 * batch.pool_indices.shape[1] + has_position_hint


def test_training_writes_weights_and_tokenizer(tmp_path: Path, monkeypatch):
    short = Schedule(steps=2, batch=4, peak_rate=1e-3, seed=1)
    monkeypatch.setattr(train, "TRAINING_PAGES", 40)
    monkeypatch.setattr(train, "TOWER", short)
    monkeypatch.setattr(train, "ALIGNMENT", short)
    monkeypatch.setattr(train, "ANSWERS", dict.fromkeys(ARCHITECTURES, short))

    assert train.main(["-o", str(tmp_path)]) == 0

    for architecture in ARCHITECTURES:
        loaded = models.load(tmp_path / "weights" / f"{architecture}.safetensors")
        assert loaded.architecture == architecture
        assert not loaded.model.training
    tokenizer = read_tokenizer((tmp_path / "weights" / "tokenizer.json").read_text())
    assert tokenizer.get_vocab_size() == TOKENIZER.get_vocab_size()


def test_unusable_weights_are_rejected(tmp_path: Path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")

    with pytest.raises(ModelError, match="expected family 'lmm-digits'"):
        models.load(tmp_path / "other.safetensors")


def test_page_is_attended_from_its_placeholder_to_the_next():
    ids = torch.tensor([[9, IMAGE_ID, 9, IMAGE_ID, 9]])

    mask, row_mask = train.cross_attention_mask(ids, 2)

    assert (mask[0, 0, :, ::16] == 0).tolist() == [
        [True, True],
        [True, False],
        [True, False],
        [False, True],
        [False, True],
    ]
    assert row_mask.flatten().tolist() == [0, 1, 1, 1, 1]
