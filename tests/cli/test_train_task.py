"""`trimtab train-task`: a task for a model that serves others, judged at every point on images held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from trimtab.app import run
from trimtab.commands.train_task import image_classification
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.tasks import parse_task_record

FOLDER = Path(__file__).parents[2] / "pipelines" / "vit-tasks"
HERE = "tests.cli.test_train_task"


class Stripes:
    """Horizontal or vertical stripes."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 60, (1, 32, 32))
        pixels[:, ::2] += 150 * (index % 2)
        pixels[:, :, ::2] += 150 * (1 - index % 2)
        return {"image": pixels.astype(np.uint8)}, {"label": index % 2}


class Named(Stripes):
    """The same samples with words as labels."""

    def __getitem__(self, index):
        image, truth = super().__getitem__(index)
        return image, {"label": "lying" if truth["label"] else "standing"}


def command(task, samples, out):
    options = ["--samples", f"{HERE}:{samples}", "--variant", "vit-small", "--steps", "40", "-o", str(out)]
    options += ["--utility", "0.5", "--latency", "150ms"]
    return run(["train-task", str(FOLDER), task, *options])


def test_task_is_trained_and_evaluated_at_every_point(tmp_path, capsys):
    code = command("stripes", "Stripes", tmp_path / "weights" / "more.safetensors")
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["figures"]
    card = parse_task_record((tmp_path / "weights" / "more.safetensors").read_bytes())

    assert code == 0
    assert card.classes == ("0", "1")
    assert card.accuracy_by_point["full"].value == figures["full_accuracy"]
    assert card.accuracy_by_point["full"].samples == 12
    for judged in card.accuracy_by_point.values():
        assert judged.mean_confidence is not None
        assert 0.5 < judged.mean_confidence <= 1.0, "of two classes"
        assert (
            judged.samples_digest
            == LabelledPayloads(image_classification(load_pipeline(FOLDER)), f"{HERE}:Stripes").digest()
        )
    assert (card.utility, card.latency_seconds) == (0.5, 0.15)
    assert figures["held_out"] == 12
    assert figures["full_accuracy"] > 0.9
    assert {name for name in figures if name.endswith("_accuracy")} >= {"full_accuracy", "merge-4_accuracy"}


@pytest.mark.parametrize(
    ("task", "samples", "words"),
    [("digits", "Stripes", "task 'digits' exists"), ("new", "Named", "label 'standing'")],
)
def test_invalid_task_is_rejected(tmp_path, capsys, task, samples, words):
    code = command(task, samples, tmp_path / "more.safetensors")
    found = capsys.readouterr()

    assert code != 0
    assert words in found.err + found.out
    assert not (tmp_path / "more.safetensors").exists()
