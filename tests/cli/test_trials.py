"""`trimtab tune`: candidates are timed, evaluated and compiled within a time budget."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model_servers.test_model_adapters import a_spec
from trimtab.tuning import compiling
from trimtab.tuning.candidates import TuningHardware, precisions_to_try, why_not_faster, why_not_tried
from trimtab.tuning.measurement import QualityEvaluator, TimeBudget, Timer, run_trials
from trimtab.tuning.selection import Trial, choose
from trimtab_loadtester.payloads.interface import Payload, Score
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

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
            {
                "FP16": "the processor has no AVX512-FP16 or AMX-FP16",
                "INT8": "its kernels run on CPUs, not on a GPU",
            },
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
        (
            "None",
            set(),
            "4.02 × the time of the full model: the processor's instructions are unknown",
        ),
        ("Here", set(), "4.02 × the time of the full model on this GPU"),
    ],
)
def test_slow_precision_states_missing_instructions(gpu, processor, words):
    assert why_not_faster("BF16", 4.02, TuningHardware(gpu, frozenset(processor))) == words
