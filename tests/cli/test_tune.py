"""`trimtab tune`: candidates are timed, evaluated and compiled within a budget, selected, and written."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as Torchvision

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.model_servers.test_model_adapters import a_spec
from trimtab.app import run
from trimtab.tuning import compiling
from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.candidates import (
    FULL,
    TuningHardware,
    candidate_points,
    precisions_to_try,
    why_not_faster,
    why_not_tried,
)
from trimtab.tuning.measurement import QualityEvaluator, TimeBudget, Timer, run_trials
from trimtab.tuning.selection import Trial, choose
from trimtab.tuning.target import tuning_target, with_points
from trimtab_loadtester.payloads.interface import Payload, Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_model_servers.transformer.compiled import instructions
from trimtab_pipelines.accuracy_evidence import AGREEMENT, Accuracy, wilson_interval
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Compiling takes minutes; it is tested with the transformer."""
    monkeypatch.setenv("CXX", "no-such-compiler")


RULES = ["bipartite", "energy", "guided"]
PRECISIONS = precisions_to_try(TuningHardware("None", instructions()))


def a_trial(name, accuracy, row_seconds, **knobs):
    measured = Accuracy(
        value=accuracy, source="Measured", samples=100, low=0, high=1, samples_digest="sha256:" + 64 * "0"
    )
    return Trial(OperatingPoint(name=name, accuracy=0, **knobs), measured, {1: 9.0, 8: 8 * row_seconds})


def test_candidates_have_valid_schedules():
    found = candidate_points(196, 12, RULES, ["BF16"])
    schedules = [point.merging.schedule for point in found if point.merging]

    assert len(found) >= 8
    assert found[0] == FULL
    assert len({point.name for point in found}) == len(found)
    assert all(len(schedule) in {1, 12} and max(schedule) <= 98 for schedule in schedules)
    assert {point.merging.rule for point in found if point.merging} == {None, "energy", "guided"}
    assert any(point.precision == "BF16" and point.merging for point in found)


def test_dominated_candidates_are_rejected_with_a_reason():
    choice = choose(
        [
            a_trial("full", 0.90, 1.0),
            a_trial("alike", 0.895, 0.97),
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
        "alike": "less than 5% faster than full, which is as accurate",
        "slow": "1.30 × the time of the full model on this machine",
        "beaten": "fast is as accurate and takes 0.86 × its time",
        "hardly": "fastest is as accurate and takes 0.69 × its time",
        "wrong": "accuracy 0.5000 is below the floor 0.8550",
    }


VIT = a_variant("vit", family="vision-transformer", parameters={"heads": 2}, storageUri="vit.safetensors")
LOGITS = {"name": "logits", "datatype": "FP32", "shape": [4]}
IMAGE = {"datatype": "FP32", "shape": [3, 32, 32]}


def a_classifier(source, *variants):
    inputs = [{"name": "image", "from": source}]
    return a_stage("classify", inputs=inputs, outputs=[LOGITS], batchSizes=[1, 2, 4], variants=list(variants))


def a_document(**variant):
    return a_pipeline_document(
        [a_classifier("request.inputs.image", VIT | variant)],
        inputs=[{"name": "image", **IMAGE}],
        outputs=[{"name": "logits", "from": "classify.outputs.logits"}],
        budget={"cores": "1"},
    )


PIPELINE = "# mine\n" + yaml.safe_dump(a_document())
BEHIND = "# behind another\n" + yaml.safe_dump(
    a_pipeline_document(
        [
            a_stage("pass", outputs=[{"name": "y", **IMAGE}]),
            a_classifier("pass.outputs.y", a_variant("other", family="echo"), VIT),
        ],
        inputs=[{"name": "x", **IMAGE}],
        outputs=[{"name": "named", "from": "classify.outputs.logits"}],
    )
)


def test_yaml_edit_replaces_points_and_keeps_comments(tmp_path):
    selected = [
        a_trial("full", 0.9, 1.0),
        a_trial("fast", 0.8, 0.5, merging=TokenMerging(schedule=(3, 2), rule="energy")),
    ]
    once = with_points(PIPELINE, "classify", "vit", selected)
    twice = with_points(once, "classify", "vit", selected[:1])
    for text, names in ((twice, ["full"]), (once, ["full", "fast"])):
        (tmp_path / "pipeline.yaml").write_text(text)
        points = load_pipeline(tmp_path).spec.stages[0].variants[0].operating_points

        assert [point.name for point in points] == names
        assert text.startswith("# mine\n")
    fast = points[1]
    assert (fast.merging, fast.accuracy, fast.measured_accuracy().samples) == (selected[1].point.merging, 0.8, 100)


def test_tune_of_one_stage_uses_samples_of_its_inputs(mine, capfd):
    (mine / "pipeline.yaml").write_text(BEHIND)
    given = ["tune", str(mine), "--samples", str(mine / "samples"), "--floor", "0.5", "--stage", "classify"]
    code = run([*given, "--variant", "vit"])
    out, err = capfd.readouterr()
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])["figures"]
    passing, classify = load_pipeline(mine).spec.stages
    other, vit = classify.variants

    assert (vit.operating_points[0].name, vit.operating_points[0].accuracy) == ("full", 1.0)
    assert figures["tried"] >= 8
    assert len(vit.operating_points) == figures["selected"]
    assert all(point.measured_accuracy().samples == 24 for point in vit.operating_points)
    assert "full-int8" in out or "INT8 rejected: " in " ".join(out.split())
    assert (other.operating_points, passing.variants[0].operating_points) == ((), ())
    assert (mine / "pipeline.yaml").read_text().startswith("# behind another\n")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([], "several stages; choose one by --stage: pass, classify"),
        (["--stage", "cut"], "no such stage; the pipeline has: pass, classify"),
        (["--stage", "classify"], "several variants; choose one by --variant: other, vit"),
        (["--stage", "classify", "--variant", "vot"], "no such variant; stage classify has: other, vit"),
    ],
)
def test_ambiguous_stage_or_variant_is_rejected(mine, capfd, named, words):
    (mine / "pipeline.yaml").write_text(BEHIND)

    assert run(["tune", str(mine), "--samples", str(mine / "samples"), *named]) == 1
    assert words in " ".join(capfd.readouterr().err.split())


def test_variant_in_flow_style_is_rejected():
    with pytest.raises(DocumentError, match="block style"):
        with_points(json.dumps(a_document()), "classify", "vit", [])


@pytest.fixture
def mine(tmp_path):
    """A transformer whose answers are the labels: only merging causes errors."""
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


def test_spent_budget_selects_only_the_full_model(mine, capfd):
    assert run(["tune", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) == 0
    out = capfd.readouterr().out
    figures = json.loads(out.splitlines()[-1])["figures"]

    assert "no point compiled: " in " ".join(out.split()), "there is no compiler"
    assert not list(mine.glob("*.pt2"))
    assert (figures["selected"], figures["full_accuracy"]) == (1, 1.0)
    points = candidate_points(64, 3, RULES, PRECISIONS)
    assert figures["unevaluated"] + figures["untimed"] + figures["tried"] == len(points)
    assert [point.name for point in load_pipeline(mine).spec.stages[0].variants[0].operating_points] == ["full"]


def test_unlabelled_samples_measure_agreement(mine, capfd):
    pixels = np.random.default_rng(1).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(mine / f"{number}.png")
    (mine / "images").mkdir()
    for file in mine.glob("*.png"):
        file.rename(mine / "images" / file.name)

    assert run(["tune", str(mine), "--samples", str(mine / "images"), "--floor", "0.1"]) == 0
    out = capfd.readouterr().out
    figures, variant = json.loads(out.splitlines()[-1])["figures"], load_pipeline(mine).spec.stages[0].variants[0]
    full, *others = [point.measured_accuracy() for point in variant.operating_points]

    assert ", which is not an accuracy" in " ".join(out.split())
    assert (figures["full_agreement"], "full_accuracy" in figures) == (1.0, False)
    assert (full.value, full.low, full.high) == (1.0, 1.0, 1.0), "it agrees with itself"
    assert full.evidence_label == f"{AGREEMENT} (n 24, 1.000–1.000)"
    assert variant.accuracy_evidence.source == "Agreement"
    for each in others:
        assert (each.source, each.samples) == ("Agreement", 24)
        assert each.low is not None
        assert each.low < each.value <= (each.high or 0)
        assert each.value == pytest.approx(round(each.value * 24) / 24, abs=1e-4)


def test_agreement_compares_with_the_full_model(mine):
    document = tuning_target(load_pipeline(mine), None, None)
    points = [FULL, OperatingPoint(name="strong", accuracy=0, merging=TokenMerging(schedule=(32,)))]
    model = CandidateModel(document, mine, points)
    for number in range(40):
        np.save(mine / f"{number}.npy", torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(number)))
    lines = [json.dumps({"inputs": {"image": f"{number}.npy"}}) for number in range(40)]
    (mine / "unlabelled.jsonl").write_text("\n".join(lines))
    samples = LabelledPayloads(document, str(mine / "unlabelled.jsonl"), labels="Optional")
    evaluator = QualityEvaluator(model, samples, 40, 7)
    rows = model.rows([samples.payload(number) for number in range(40)])
    alike = int((model.labels(rows, points[0]) == model.labels(rows, points[1])).sum())

    found = [one.accuracy for point in points if (one := evaluator.evaluate(point)) is not None]
    assert [(one.value, one.source) for one in found] == [(1.0, "Agreement"), (alike / 40, "Agreement")]
    assert alike < 40, "the points must differ"
    assert (found[1].low, found[1].high) == pytest.approx(wilson_interval(alike, 40), abs=2e-4)


def test_gpu_variant_is_not_tuned_without_a_gpu(mine, capfd):
    (mine / "pipeline.yaml").write_text(yaml.safe_dump(a_document(resources={"cpu": "1", "gpu": 1})))
    assert run(["tune", str(mine), "--samples", str(mine / "samples"), "--seconds", "0"]) != 0
    assert "torch finds no GPU here" in capfd.readouterr().err


def test_model_without_tokens_is_rejected(tmp_path, capfd):
    echo = {"family": "echo", "storageUri": "random://?seed=1", "parameters": {}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(a_document(**echo)))
    (tmp_path / "samples.jsonl").write_text('{"inputs": {"image": 0}, "outputs": {"logits": 1}}\n')

    assert run(["tune", str(tmp_path), "--samples", str(tmp_path)]) == 1
    assert "family 'echo' does not merge tokens" in capfd.readouterr().err


COMPILED = {"full-compiled": 0.9, "half-compiled": 0.49, "third-compiled": 0.33}
KNOBS: dict[str, dict[str, Any]] = {
    "full-bf16": {"precision": "BF16"},
    "half-bf16": {"precision": "BF16", "merging": TokenMerging(schedule=(1,))},
    "full-int8": {"precision": "INT8"},
}
ROW_SECONDS = {"full": 1.0, "slow": 1.5, "half": 0.5, "third": 0.3, "quarter": 0.25}


class FakeModel:
    """Fake of `CandidateModel` and of `LabelledPayloads`."""

    def __init__(self, row_seconds):
        self.now, self.row_seconds = 0.0, row_seconds
        self.points = [OperatingPoint(name=name, accuracy=0, **KNOBS.get(name, {})) for name in row_seconds]
        self.labelled = True

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

    def spec_at(self, point):
        return point

    def add_point(self, point, _like, _folder):
        self.row_seconds[point.name] = COMPILED[point.name]


def with_tools(model: Any, seconds: float) -> tuple[Any, QualityEvaluator, Timer]:
    timer = Timer(model, [model.payload(index) for index in range(8)], lambda _: None, TimeBudget(seconds, model.clock))
    return model, QualityEvaluator(model, model, 80, 8), timer


def run_within(seconds):
    model: Any = FakeModel(ROW_SECONDS)
    return model, run_trials(*with_tools(model, seconds), [1, 8])


@pytest.mark.parametrize(
    ("seconds", "evaluated", "unevaluated"),
    [
        (1_000, ["full", "half", "third", "quarter"], []),
        (240, ["full", "half"], ["third", "quarter"]),
        (0, ["full"], ["half", "third", "quarter"]),
    ],
)
def test_spent_budget_ends_evaluation_and_keeps_results(seconds, evaluated, unevaluated):
    model, found = run_within(seconds)

    assert [trial.point.name for trial in found.trials] == evaluated
    assert (list(found.slow), found.unevaluated) == (["slow"], unevaluated)
    assert found.row_seconds == pytest.approx(ROW_SECONDS)
    least = 2 * 8 * sum(ROW_SECONDS.values()) + 80 * ROW_SECONDS["full"]
    assert model.now <= max(seconds + 8 * max(ROW_SECONDS.values()), least)


def test_slower_candidate_is_not_evaluated():
    _, found = run_within(1_000)

    assert found.slow == {"slow": "1.50 × the time of the full model on this machine"}


def test_merging_in_a_slow_precision_is_not_timed():
    model: Any = FakeModel({"full": 1.0, "full-bf16": 1.3, "half-bf16": 0.4, "full-int8": 0.5})
    found = run_trials(*with_tools(model, 1_000), [1, 8])

    assert dict(found.slow_precisions) == pytest.approx({"BF16": 1.3})
    assert [trial.point.name for trial in found.trials] == ["full", "full-int8"]
    assert found.row_seconds.keys() == {"full", "full-int8"}


def compiled_within(monkeypatch, seconds, names, failing=()):
    """Compile selected points, each in 100 seconds; some fail."""
    model: Any = FakeModel({name: ROW_SECONDS[name] for name in names})
    model, evaluator, timer = with_tools(model, seconds)
    selected = run_trials(model, evaluator, timer, [1, 8]).trials

    def compile_in_subprocess(order, budget):
        if budget.left() < 100:
            return CompileResult(failed=compiling.OUT_OF_TIME)
        model.now += 100
        return CompileResult(failed="unsupported") if order.spec.name in failing else CompileResult(name="inductor-0")

    monkeypatch.setattr(compiling, "compile_in_subprocess", compile_in_subprocess)
    monkeypatch.setattr(compiling, "CompileRequest", lambda spec, folder: SimpleNamespace(spec=spec, folder=folder))
    return selected, compiling.compile_points(model, selected, evaluator, timer, [1, 8], Path())


def test_compiled_point_is_rejected_unless_faster(monkeypatch):
    selected, found = compiled_within(monkeypatch, 10_000, ["full", "half", "third"])

    assert [(trial.point.name, trial.point.compiled) for trial in found.trials] == [("full-compiled", "inductor-0")]
    assert found.trials[0].row_seconds == pytest.approx(0.9)
    assert found.rejected == {
        "half": "less than 5% faster: 0.98 × the time of the plain point",
        "third": "not faster: 1.10 × the time of the plain point",
    }
    selection = choose([*selected, *found.trials], floor=0.5)
    assert [trial.point.name for trial in selection.selected] == ["full", "third"], "the accuracies are all alike"


def test_failed_compilation_states_the_reason(monkeypatch):
    selected, found = compiled_within(monkeypatch, 700, ["full", "half"], failing={"full"})

    assert [trial.point.name for trial in selected] == ["full", "half"]
    assert (list(found.trials), found.rejected["full"]) == ([], "unsupported")
    _, found = compiled_within(monkeypatch, 200, ["full"])
    assert found.rejected == {"full": compiling.OUT_OF_TIME}


def test_int8_is_not_compiled(monkeypatch):
    model: Any = FakeModel({"full-int8": 0.5})
    model, evaluator, timer = with_tools(model, 1_000)
    trial = Trial(model.points[0], Accuracy(value=1.0), {1: 0.5})

    found = compiling.compile_points(model, [trial], evaluator, timer, [1], Path())
    assert found.rejected == {"full-int8": "INT8 kernels are not compiled"}


def test_compiler_is_killed_when_the_budget_is_spent(tmp_path):
    order = CompileRequest(spec=a_spec(), folder=tmp_path)

    began = time.monotonic()
    assert compiling.compile_in_subprocess(order, TimeBudget(0.2)).failed == compiling.OUT_OF_TIME
    assert time.monotonic() - began < 30, "it would take longer to import torch, let alone to compile"


@pytest.mark.parametrize(
    ("gpu", "processor", "tried_in", "not_tried"),
    [
        ("None", {"avx2"}, ["BF16", "INT8"], {"FP16": "the processor has no AVX512-FP16 or AMX-FP16"}),
        ("None", {"asimd"}, ["BF16", "INT8"], {"FP16": "the processor has no ASIMDHP"}),
        ("Here", {"avx2"}, ["BF16", "FP16"], {"INT8": "its kernels run on CPUs, not on a GPU"}),
        (
            "Elsewhere",
            {"avx2"},
            ["BF16"],
            {"FP16": "the processor has no AVX512-FP16 or AMX-FP16", "INT8": "its kernels run on CPUs, not on a GPU"},
        ),
    ],
)
def test_precision_is_tried_if_hardware_supports_it(gpu, processor, tried_in, not_tried):
    machine = TuningHardware(gpu, frozenset(processor))

    assert precisions_to_try(machine) == tried_in
    assert why_not_tried(machine) == not_tried


@pytest.mark.parametrize(
    ("gpu", "processor", "words"),
    [
        ("None", {"avx2"}, "4.02 × the time of the full model: the processor has no AVX512-BF16 or AMX-BF16"),
        ("None", {"avx512_bf16"}, "4.02 × the time of the full model, though the processor has AVX512-BF16"),
        ("None", set(), "4.02 × the time of the full model: the processor's instructions are unknown"),
        ("Here", set(), "4.02 × the time of the full model on this GPU"),
    ],
)
def test_slow_precision_states_missing_instructions(gpu, processor, words):
    assert why_not_faster("BF16", 4.02, TuningHardware(gpu, frozenset(processor))) == words
