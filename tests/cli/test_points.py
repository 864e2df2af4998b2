"""`trimtab tune`: which forms are tried, which are selected and why, and what is written."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as Torchvision

from trimtab.app import run
from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.candidates import FULL, candidate_points
from trimtab.tuning.pipeline_edit import with_points
from trimtab.tuning.precisions import TuningHardware, precisions_to_try
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import Trial, choose
from trimtab.tuning.target import tuning_target
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.cpu_features import instructions
from trimtab_pipelines.accuracy_evidence import Accuracy, wilson_interval
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Compiling takes minutes; how forms are compiled is tested beside the transformer."""
    monkeypatch.setenv("CXX", "no-such-compiler")


RULES = ["bipartite", "energy", "guided"]
PRECISIONS = precisions_to_try(TuningHardware("None", instructions()))


def a_trial(name, accuracy, row_seconds, **knobs):
    measured = Accuracy(
        value=accuracy, source="Measured", samples=100, low=0, high=1, samples_digest="sha256:" + 64 * "0"
    )
    return Trial(OperatingPoint(name=name, accuracy=0, **knobs), measured, {1: 9.0, 8: 8 * row_seconds})


def test_forms_are_many_and_each_can_be_run():
    found = candidate_points(196, 12, RULES, ["BF16"])
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

    assert [trial.point.name for trial in choice.selected] == ["full", "fast", "fastest"]
    assert choice.rejected == {
        "slow": "1.30 × as long as the model as it is, on this machine",
        "beaten": "fast is as accurate and takes 0.86 × its time",
        "hardly": "fastest is as accurate and takes 0.69 × its time",
        "wrong": "accuracy 0.5000 is below the floor 0.8550",
    }


def test_a_step_that_is_not_worth_a_change_is_not_kept():
    choice = choose([a_trial("full", 0.9, 1.0), a_trial("alike", 0.89, 0.97)], floor=0.9)

    assert choice.rejected == {"alike": "less than 5% faster than full, which is as accurate"}


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
    selected = [
        a_trial("full", 0.9, 1.0),
        a_trial("fast", 0.8, 0.5, merging=TokenMerging(schedule=(3, 2), rule="energy")),
    ]
    once = with_points(PIPELINE, "classify", "vit", selected)
    twice = with_points(once, "classify", "vit", selected[:1])
    for text, names in ((once, ["full", "fast"]), (twice, ["full"])):
        (tmp_path / "pipeline.yaml").write_text(text)
        points = load_pipeline(tmp_path).spec.stages[0].variants[0].operating_points

        assert [point.name for point in points] == names
        assert text.startswith("# mine\n")
    fast = load_pipeline_text(tmp_path, once).points[1]
    assert (fast.merging, fast.accuracy, fast.accuracy_evidence.samples) == (selected[1].point.merging, 0.8, 100)


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
    given = ["tune", str(mine), "--samples", str(mine / "samples"), "--floor", "0.5", "--stage", "classify"]
    assert run([*given, "--variant", "vit"]) == 0, capfd.readouterr().err
    passing, classify = load_pipeline(mine).spec.stages
    other, vit = classify.variants

    assert (vit.operating_points[0].name, vit.operating_points[0].accuracy) == ("full", 1.0)
    assert len(vit.operating_points) == json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]["selected"]
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

    assert run(["tune", str(mine), "--samples", str(mine / "samples"), *named]) == 1
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
    code = run(["tune", str(mine), "--samples", str(mine / "samples"), "--floor", "0.5"])
    out, err = capfd.readouterr()
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    points = load_pipeline(mine).spec.stages[0].variants[0].operating_points

    assert told["figures"]["tried"] >= 8
    assert "full-int8" in out or "no point in INT8 is selected: INT8 takes the model" in " ".join(out.split())
    assert told["figures"]["selected"] == len(points)
    assert (points[0].name, points[0].accuracy) == ("full", 1.0)
    assert all(point.measured_accuracy().samples == 24 for point in points)


def test_without_time_the_model_as_it_is_alone_is_judged_and_the_others_are_told(mine, capfd):
    assert run(["tune", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) == 0
    out = capfd.readouterr().out
    told = json.loads(out.splitlines()[-1])["figures"]

    assert (told["selected"], told["full_accuracy"]) == (1, 1.0)
    assert told["unevaluated"] + told["untimed"] + told["tried"] == len(candidate_points(64, 3, RULES, PRECISIONS))
    assert [point.name for point in load_pipeline(mine).spec.stages[0].variants[0].operating_points] == ["full"]


def test_without_right_answers_forms_are_judged_by_agreement_and_it_is_written_and_shown_as_such(mine, capfd):
    pixels = np.random.default_rng(1).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(mine / f"{number}.png")
    (mine / "images").mkdir()
    for file in mine.glob("*.png"):
        file.rename(mine / "images" / file.name)

    assert run(["tune", str(mine), "--samples", str(mine / "images"), "--floor", "0.1"]) == 0
    out = capfd.readouterr().out
    told, variant = json.loads(out.splitlines()[-1])["figures"], load_pipeline(mine).spec.stages[0].variants[0]
    full, *others = [point.measured_accuracy() for point in variant.operating_points]

    assert "agreement with the model as it is, which is no accuracy" in " ".join(out.split())
    assert (told["full_agreement"], "full_accuracy" in told) == (1.0, False)
    assert (full.value, full.low, full.high) == (1.0, 1.0, 1.0), "it is itself, whatever the number of samples"
    assert full.evidence_label == "agreement with the model as it is (n 24, 1.000–1.000)"
    assert variant.accuracy_evidence.source == "Agreement"
    for each in others:
        assert (each.source, each.samples) == ("Agreement", 24)
        assert each.low is not None
        assert each.low < each.value <= (each.high or 0)
        assert each.value == pytest.approx(round(each.value * 24) / 24, abs=1e-4)


def test_agreement_is_with_the_models_own_answers_not_with_what_is_right(mine):
    document = tuning_target(load_pipeline(mine), None, None)
    points = [FULL, OperatingPoint(name="strong", accuracy=0, merging=TokenMerging(schedule=(32,)))]
    bench = CandidateModel(document, mine, points)
    for number in range(40):
        np.save(mine / f"{number}.npy", torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(number)))
    lines = [json.dumps({"inputs": {"image": f"{number}.npy"}}) for number in range(40)]
    (mine / "unlabelled.jsonl").write_text("\n".join(lines))
    samples = LabelledPayloads(document, str(mine / "unlabelled.jsonl"), labels="Optional")
    evaluator = QualityEvaluator(bench, samples, 40, 7)
    rows = bench.rows([samples.payload(number) for number in range(40)])
    alike = int((bench.labels(rows, points[0]) == bench.labels(rows, points[1])).sum())

    found = [one.accuracy for point in points if (one := evaluator.evaluate(point)) is not None]
    assert [(one.value, one.source) for one in found] == [(1.0, "Agreement"), (alike / 40, "Agreement")]
    assert alike < 40, "or it would not be told from the model as it is"
    assert (found[1].low, found[1].high) == pytest.approx(wilson_interval(alike, 40), abs=2e-4)


def test_whole_numbers_of_eight_bits_are_not_tried_for_a_variant_on_a_gpu(mine, capfd):
    (mine / "pipeline.yaml").write_text(
        PIPELINE.replace("parameters:", 'resources: {cpu: "1", gpu: 1}\n      parameters:')
    )
    assert run(["tune", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]

    tried = [precision for precision in PRECISIONS if precision != "INT8"]
    assert "BF16" in tried
    assert told["unevaluated"] + told["untimed"] + told["tried"] == len(candidate_points(64, 3, RULES, tried))


def test_forms_are_not_compiled_where_that_cannot_be_and_it_is_said_why(mine, capfd):
    given = ["tune", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]
    assert run(given) == 0
    told = " ".join(capfd.readouterr().out.split())

    assert "no point is compiled: there is no C++ compiler here (no-such-compiler); install one" in told
    assert not list(mine.glob("*.pt2"))


def test_a_model_without_tokens_is_refused_by_name(tmp_path, capfd):
    text = PIPELINE.replace("vision-transformer", "torchvision/resnet18").replace("vit.safetensors", "random://?seed=1")
    (tmp_path / "pipeline.yaml").write_text(text.replace("      parameters: {heads: 2}\n", ""))
    (tmp_path / "samples.jsonl").write_text('{"inputs": {"image": 0}, "outputs": {"logits": 1}}\n')

    assert run(["tune", str(tmp_path), "--samples", str(tmp_path)]) == 1
    assert "family 'torchvision/resnet18' merges no tokens" in capfd.readouterr().err
