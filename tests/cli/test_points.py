"""`trimtab points`: which forms are tried, which are kept and why, and what is written."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as Torchvision

from trimtab.commands import run
from trimtab.points.choice import Trial, choose
from trimtab.points.forms import FULL, forms
from trimtab.points.trials import Budget, tried
from trimtab.points.writing import with_points
from trimtab.verbs.points import PRECISIONS
from trimtab_loadtester.payload import Payload, Score
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.evidence import Accuracy
from trimtab_pipelines.operating_point import Merging, OperatingPoint

RULES = ["bipartite", "energy", "guided"]


def a_trial(name, accuracy, row_seconds, **knobs):
    measured = Accuracy(
        value=accuracy, source="Measured", samples=100, low=0, high=1, samples_digest="sha256:" + 64 * "0"
    )
    return Trial(OperatingPoint(name=name, accuracy=0, **knobs), measured, {1: 9.0, 8: 8 * row_seconds})


def test_forms_are_many_and_each_can_be_run():
    found = forms(196, 12, RULES, ["BF16"])
    schedules = [point.merging.schedule for point in found if point.merging]

    assert len(found) >= 8
    assert found[0] == FULL
    assert len({point.name for point in found}) == len(found)
    assert all(len(schedule) in {1, 12} and max(schedule) <= 98 for schedule in schedules)
    assert {point.merging.rule for point in found if point.merging} == {None, "energy", "guided"}
    assert any(point.precision == "BF16" and point.merging for point in found)


def test_what_nothing_beats_is_kept_and_each_other_has_its_reason():
    choice = choose(
        [
            a_trial("full", 0.90, 1.0),
            a_trial("fast", 0.88, 0.6),
            a_trial("slow", 0.89, 1.3),
            a_trial("beaten", 0.87, 0.7),
            a_trial("hardly", 0.86, 0.58),
            a_trial("fastest", 0.86, 0.4),
            a_trial("wrong", 0.50, 0.1),
        ],
        floor=0.95,
    )

    assert [trial.point.name for trial in choice.kept] == ["full", "fast", "fastest"]
    assert choice.refused == {
        "slow": "1.30 × as long as the model as it is, on this machine",
        "beaten": "fast is as accurate and takes 0.86 × its time",
        "hardly": "fastest is as accurate and takes 0.69 × its time",
        "wrong": "accuracy 0.5000 is below the floor 0.8550",
    }


def test_a_step_that_is_not_worth_a_change_is_not_kept():
    choice = choose([a_trial("full", 0.9, 1.0), a_trial("alike", 0.89, 0.97)], floor=0.9)

    assert choice.refused == {"alike": "less than 5% faster than full, which is as accurate"}


PIPELINE = """\
# mine
apiVersion: trimtab.dev/v1alpha1
kind: InferencePipeline
metadata: {name: mine}
spec:
  inputs:
  - {name: image, datatype: FP32, shape: [3, 32, 32]}
  outputs:
  - {name: logits, from: classify.outputs.logits}
  slo: {latency: 500ms}
  budget: {cores: "1"}
  stages:
  - name: classify
    inputs:
    - {name: image, from: request.inputs.image}
    outputs:
    - {name: logits, datatype: FP32, shape: [4]}
    batchSizes: [1, 2, 4]
    variants:
    - name: vit
      family: vision-transformer
      parameters: {heads: 2}
      storageUri: vit.safetensors
      accuracy: 0.5  # guessed
"""


def test_what_is_kept_takes_the_place_of_what_was_there_and_comments_stay(tmp_path):
    kept = [a_trial("full", 0.9, 1.0), a_trial("fast", 0.8, 0.5, merging=Merging(schedule=(3, 2), rule="energy"))]
    once = with_points(PIPELINE, "classify", "vit", kept)
    twice = with_points(once, "classify", "vit", kept[:1])
    for text, names in ((once, ["full", "fast"]), (twice, ["full"])):
        (tmp_path / "pipeline.yaml").write_text(text)
        points = load_pipeline(tmp_path).spec.stages[0].variants[0].operating_points

        assert [point.name for point in points] == names
        assert text.startswith("# mine\n")
    fast = load_pipeline_text(tmp_path, once).points[1]
    assert (fast.merging, fast.accuracy, fast.accuracy_evidence.samples) == (kept[1].point.merging, 0.8, 100)


BEHIND = """\
# behind another
apiVersion: trimtab.dev/v1alpha1
kind: InferencePipeline
metadata: {name: behind}
spec:
  inputs:
  - {name: x, datatype: FP32, shape: [3, 32, 32]}
  outputs:
  - {name: named, from: classify.outputs.logits}
  slo: {latency: 500ms}
  budget: {cores: "2"}
  stages:
  - name: pass
    inputs:
    - {name: x, from: request.inputs.x}
    outputs:
    - {name: y, datatype: FP32, shape: [3, 32, 32]}
    variants:
    - name: echo
      family: echo
      storageUri: random://?seed=1
      accuracy: 1
  - name: classify
    inputs:
    - {name: image, from: pass.outputs.y}
    outputs:
    - {name: logits, datatype: FP32, shape: [4]}
    batchSizes: [1, 2, 4]
    variants:
    - name: other
      family: torchvision/resnet18
      storageUri: random://?seed=1
      accuracy: 0.4
    - name: vit
      family: vision-transformer
      parameters: {heads: 2}
      storageUri: vit.safetensors
      accuracy: 0.5
"""


def test_points_of_a_variant_in_a_longer_pipeline_are_found_on_samples_of_its_stage(mine, capfd):
    (mine / "pipeline.yaml").write_text(BEHIND)
    given = ["points", str(mine), "--samples", str(mine / "samples"), "--floor", "0.5", "--stage", "classify"]
    assert run([*given, "--variant", "vit"]) == 0, capfd.readouterr().err
    passing, classify = load_pipeline(mine).spec.stages
    other, vit = classify.variants

    assert (vit.operating_points[0].name, vit.operating_points[0].accuracy) == ("full", 1.0)
    assert len(vit.operating_points) == json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]["kept"]
    assert (other.operating_points, passing.variants[0].operating_points) == ((), ())
    assert (mine / "pipeline.yaml").read_text().startswith("# behind another\n")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([], "several stages; name one by --stage: pass, classify"),
        (["--stage", "cut"], "no such stage; there are: pass, classify"),
        (["--stage", "classify"], "several variants; name one by --variant: other, vit"),
        (["--stage", "classify", "--variant", "vot"], "no such variant; there are: other, vit"),
    ],
)
def test_whose_points_are_found_must_be_told_where_there_are_several(mine, capfd, named, words):
    (mine / "pipeline.yaml").write_text(BEHIND)

    assert run(["points", str(mine), "--samples", str(mine / "samples"), *named]) == 1
    assert words in " ".join(capfd.readouterr().err.split())


def load_pipeline_text(folder, text):
    (folder / "pipeline.yaml").write_text(text)
    return load_pipeline(folder).spec.stages[0].variants[0]


def test_a_variant_in_one_line_is_refused():
    text = PIPELINE[: PIPELINE.index("    - name: vit\n")] + "    - {name: vit, accuracy: 0.5}\n"
    with pytest.raises(DocumentError, match="write its fields one below the other"):
        with_points(text, "classify", "vit", [])


@pytest.fixture
def mine(tmp_path):
    """A transformer whose answers are the truth, so that only what merging changes is wrong."""
    torch.manual_seed(1)
    stock = Torchvision(32, 4, 3, 2, 32, 64, num_classes=4).eval()
    torch.nn.init.normal_(stock.heads.head.weight)
    save_file(stock.state_dict(), tmp_path / "vit.safetensors")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    samples = tmp_path / "samples"
    samples.mkdir()
    lines = []
    for number in range(24):
        image = torch.randn(3, 32, 32)
        np.save(samples / f"{number}.npy", image.numpy())
        with torch.inference_mode():
            label = int(stock(image[None]).argmax())
        lines.append(json.dumps({"inputs": {"image": f"{number}.npy"}, "outputs": {"logits": label}}))
    (samples / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_points_are_found_written_and_can_be_read(mine, capfd):
    code = run(["points", str(mine), "--samples", str(mine / "samples"), "--floor", "0.5"])
    out, err = capfd.readouterr()
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    points = load_pipeline(mine).spec.stages[0].variants[0].operating_points

    assert told["figures"]["tried"] >= 8
    assert "full-int8" in out
    assert told["figures"]["kept"] == len(points)
    assert (points[0].name, points[0].accuracy) == ("full", 1.0)
    assert all(point.judged().samples == 24 for point in points)


def test_without_time_the_model_as_it_is_alone_is_judged_and_the_others_are_told(mine, capfd):
    assert run(["points", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) == 0
    out = capfd.readouterr().out
    told = json.loads(out.splitlines()[-1])["figures"]

    assert (told["kept"], told["full_accuracy"]) == (1, 1.0)
    assert told["unjudged"] + told["tried"] == len(forms(64, 3, RULES, PRECISIONS))
    assert [point.name for point in load_pipeline(mine).spec.stages[0].variants[0].operating_points] == ["full"]


def test_whole_numbers_of_eight_bits_are_not_tried_for_a_variant_on_a_gpu(mine, capfd):
    (mine / "pipeline.yaml").write_text(
        PIPELINE.replace("parameters:", 'resources: {cpu: "1", gpu: 1}\n      parameters:')
    )
    assert run(["points", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]

    assert told["unjudged"] + told["tried"] == len(forms(64, 3, RULES, ["BF16"]))


class Clockwork:
    """A bench whose forms take what is said, on a clock of its own, and labels that are all right."""

    def __init__(self, row_seconds):
        self.now, self.row_seconds = 0.0, row_seconds
        self.points = [OperatingPoint(name=name, accuracy=0) for name in row_seconds]

    def clock(self):
        return self.now

    def rows(self, payloads):
        return payloads

    def run(self, payloads, point):
        self.now += len(payloads) * self.row_seconds[point.name]
        return {"label": torch.zeros(len(payloads))}, None

    def payload(self, _index):
        return Payload(())

    def score(self, _truth, _outputs):
        return Score(1, 1)

    def task(self, _index):
        return ""

    def tasks(self, _count):
        return ()

    def digest(self):
        return "sha256:" + 64 * "0"


FORMS = {"full": 1.0, "slow": 1.5, "half": 0.5, "third": 0.3, "quarter": 0.25}


def tried_within(seconds):
    bench: Any = Clockwork(FORMS)
    budget = Budget(seconds, bench.clock)
    return bench, tried(bench, bench, 80, [1, 8], lambda _: None, budget)


@pytest.mark.parametrize(
    ("seconds", "judged", "unjudged"),
    [
        (1_000, ["full", "half", "third", "quarter"], []),
        (240, ["full", "half"], ["third", "quarter"]),
        (0, ["full"], ["half", "third", "quarter"]),
    ],
)
def test_what_is_judged_when_the_time_is_over_counts_and_no_batch_begins_after_it(seconds, judged, unjudged):
    bench, found = tried_within(seconds)

    assert [trial.point.name for trial in found.trials] == judged
    assert (list(found.slow), found.unjudged) == (["slow"], unjudged)
    assert found.row_seconds == pytest.approx(FORMS)
    least = 2 * 8 * sum(FORMS.values()) + 80 * FORMS["full"]
    assert bench.now <= max(seconds + 8 * max(FORMS.values()), least)


def test_a_form_that_saves_no_time_is_not_judged_and_told_why():
    _, found = tried_within(1_000)

    assert found.slow == {"slow": "1.50 × as long as the model as it is, on this machine"}


def test_a_model_without_tokens_is_refused_by_name(tmp_path, capfd):
    text = PIPELINE.replace("vision-transformer", "torchvision/resnet18").replace("vit.safetensors", "random://?seed=1")
    (tmp_path / "pipeline.yaml").write_text(text.replace("      parameters: {heads: 2}\n", ""))
    (tmp_path / "samples.jsonl").write_text('{"inputs": {"image": 0}, "outputs": {"logits": 1}}\n')

    assert run(["points", str(tmp_path), "--samples", str(tmp_path)]) == 1
    assert "family 'torchvision/resnet18' merges no tokens" in capfd.readouterr().err
