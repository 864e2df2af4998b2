"""`trimtab train-task`: a task for a model that serves others; what is trained and judged is what replicas serve."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as Torchvision

from tests.cli.pipelines import TASK_INPUT, a_transformer_pipeline
from trimtab.app import run
from trimtab.commands.train_task import image_classification, read_images
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.model_spec import model_spec
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
    ("task", "samples", "words"), [("digits", "Stripes", "task 'digits' exists"), ("new", "Named", "label 'standing'")]
)
def test_invalid_task_is_rejected(tmp_path, capsys, task, samples, words):
    code = command(task, samples, tmp_path / "more.safetensors")
    found = capsys.readouterr()

    assert code != 0
    assert words in found.err + found.out
    assert not (tmp_path / "more.safetensors").exists()


INPUTS = ({"name": "image", "datatype": "UINT8", "shape": [3, 32, 32]}, TASK_INPUT)
OWN = {"heads": 2, "normalisation": "ImageNet"}
POINTS = [{"name": "full", "accuracy": 0.5}, {"name": "rough", "accuracy": 0.5, "precision": "BF16"}]


class Tints:
    """Noise, slightly redder or bluer; the differences are small, so that some images are misclassified."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        label = index % 2
        pixels = np.random.default_rng(index).integers(0, 200, (3, 32, 32))
        pixels[2 * label] += index % 7
        return {"image": pixels.astype(np.uint8)}, {"label": label}


def weights(folder):
    torch.manual_seed(7)
    stock = Torchvision(32, 8, 2, 2, 32, 64, num_classes=5)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_file(stock.state_dict(), folder / "stock.safetensors")


def written(folder, parameters, points, tasks=()):
    variant = {"parameters": parameters, "tasks": list(tasks), "operatingPoints": points}
    pipeline = a_transformer_pipeline(INPUTS, storageUri="stock.safetensors", **variant)
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))


def train(folder, parameters=OWN, points=POINTS):
    written(folder, parameters, points)
    options = ["--samples", f"{HERE}:Tints", "--steps", "60", "-o", str(folder / "tints.safetensors")]
    assert run(["train-task", str(folder), "tints", *options]) == 0
    return parse_task_record((folder / "tints.safetensors").read_bytes())


def replica(folder, parameters=OWN, points=POINTS):
    written(folder, parameters, points, [{"name": "tints", "storageUri": "tints.safetensors"}])
    document = load_pipeline(folder / "pipeline.yaml")
    stage = document.spec.stages[0]
    return load_model(model_spec(document, folder, stage, stage.variants[0], 1.0))


def held_out(folder):
    alone = image_classification(load_pipeline(folder / "pipeline.yaml"))
    pixels, labels = read_images(LabelledPayloads(alone, f"{HERE}:Tints", 0), None)
    return torch.from_numpy(pixels)[180:], torch.from_numpy(labels)[180:]


def answered(model, point, pixels, labels):
    chosen = model.spec.point(point)
    with torch.inference_mode():
        return model.network.infer({"image": pixels, "task": torch.ones_like(labels)}, chosen)


def accuracy(model, point, pixels, labels):
    return round(float((answered(model, point, pixels, labels)["label"] == labels).double().mean()), 4)


@pytest.mark.parametrize("unusual", [{}, {"proportional_attention": False}], ids=["proportional", "not"])
def test_served_accuracy_matches_the_task_record(tmp_path, capsys, unusual):
    weights(tmp_path)
    merged = {"name": "merged", "accuracy": 0.5, "merging": {"schedule": [6]}}
    parameters, points = OWN | unusual, [*POINTS, merged]
    card = train(tmp_path, parameters, points)
    model = replica(tmp_path, parameters, points)
    pixels, labels = held_out(tmp_path)
    judged = {point: one.value for point, one in card.accuracy_by_point.items()}

    assert judged == {point["name"]: accuracy(model, point["name"], pixels, labels) for point in points}
    assert 0.5 < judged["full"] < 1.0
    certain = {name: answered(model, name, pixels, labels)["confidence"].double().mean() for name in judged}
    assert {name: one.mean_confidence for name, one in card.accuracy_by_point.items()} == pytest.approx(
        {name: float(one) for name, one in certain.items()}, abs=2e-4
    )


def test_prompts_and_merging_are_trained_for_each_point(tmp_path, capsys):
    """The weights' own task has neither; its answers in the same batch do not change."""
    weights(tmp_path)
    merging = {"schedule": [6]}
    points = [
        POINTS[0],
        {"name": "fine", "accuracy": 0.5, "prompts": {"count": 2}},
        {"name": "joined", "accuracy": 0.5, "prompts": {"count": 2, "mode": "Accumulate"}},
        {"name": "merged", "accuracy": 0.5, "merging": merging},
        {"name": "both", "accuracy": 0.5, "prompts": {"count": 2}, "merging": merging},
    ]
    card = train(tmp_path, points=points)
    model = replica(tmp_path, points=points)
    pixels, labels = held_out(tmp_path)
    network = model.network
    assert isinstance(network, ServedTransformer)
    used = {point: network.active_tasks.banks[ready.prompt_variant].heads for point, ready in network.points.items()}
    both = torch.tensor([0, 1])

    assert {point for point, heads in used.items() if heads[1].prompts is not None} == {"fine", "joined", "both"}
    assert len({id(heads[1]) for heads in used.values()}) == len(points)
    assert len({id(heads[0]) for heads in used.values()}) == 1
    for point in points:
        name, chosen = point["name"], model.spec.point(point["name"])
        plain = model.spec.point("merged" if "merging" in point else "full")
        with torch.inference_mode():
            mixed = network.infer({"image": pixels[:2], "task": both}, chosen)
            own = network.infer({"image": pixels[:1], "task": both[:1]}, plain)

        assert card.accuracy_by_point[name].value == accuracy(model, name, pixels, labels)
        assert torch.allclose(mixed["logits"][:1], own["logits"], atol=1e-4)


@pytest.mark.parametrize("other", [{"normalisation": "Half"}, {"proportional_attention": False}])
def test_task_of_other_parameters_is_rejected(tmp_path, capsys, other):
    weights(tmp_path)
    train(tmp_path)

    with pytest.raises(Exception, match="on this one with other parameters"):
        replica(tmp_path, OWN | other)
