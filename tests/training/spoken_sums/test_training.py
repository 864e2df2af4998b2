"""Training of spoken-sums: places of words, calibration, and models that the families serve."""

from pathlib import Path

import pytest

from tests.model_servers.hf.test_tasks import infer
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.spoken_sums import batches, models, train
from trimtab_training.spoken_sums.dataset import WORDS, SumSource
from trimtab_training.trainer import Schedule

FOLDER = Path(__file__).parents[3] / "pipelines" / "spoken-sums"
BRIEF = Schedule(steps=12, batch=4, peak_rate=1e-3, seed=1)


@pytest.fixture(scope="module")
def sums():
    return batches.Features(SumSource("train", 1), 16)


@pytest.fixture(scope="module")
def spoken():
    source = SumSource("held-out", 77)
    return [source.spoken(index) for index in range(4)]


def served(folder, name, rows):
    pipeline = load_pipeline(FOLDER)
    stage = next(stage for stage in pipeline.spec.stages if name.startswith(stage.name))
    model = load_model(model_spec(pipeline, folder, stage, stage.variant(name), 1.0))
    return infer(model, **{stage.inputs[0].name: rows})


def test_each_word_has_a_frame_of_its_own(sums):
    for features, mask, tokens, targets in sums.batches(8):
        for row, said, count in zip(targets, tokens, mask.sum(dim=1).tolist(), strict=True):
            path = row[: count // models.SUBSAMPLING + 1].unique_consecutive()
            assert path[path > 0].tolist() == said.tolist()
        assert targets.shape[1] == -(-features.shape[1] // models.SUBSAMPLING)


def test_trained_models_are_served_by_their_families(sums, spoken, tmp_path):
    suite = train.Suite()
    suite.__dict__ |= {"sums": sums, "calibration_sums": sums, "texts": train.draw_texts("train", 50, seed=1)}
    for variant, rows in (
        ("transcribe-s", [each.wav() for each in spoken]),
        ("answer-s", [each.text.encode() for each in spoken]),
    ):
        suite.train(variant, tmp_path / "weights" / variant, BRIEF, lambda _: None)
        outputs = served(tmp_path, variant, rows)

        texts = outputs["text" if "text" in outputs else "label"]
        assert {word for text in texts for word in text.decode().split()} <= {*WORDS, *map(str, range(100))}
        assert ((outputs["score"] >= 0) & (outputs["score"] <= 1)).all()
