"""`trimtab tune`: how forms are timed, judged and compiled within a budget, and which precisions are tried where."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.clockwork import FORMS, Clockwork, a_workplace
from tests.model_servers.test_model_adapters import a_spec
from trimtab.tuning import compiling
from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.precisions import TuningHardware, untried, why_not_faster, worth_trying
from trimtab.tuning.selection import Trial, choose
from trimtab.tuning.trials import run_trials
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_pipelines.accuracy_evidence import Accuracy


def tried_within(seconds):
    bench: Any = Clockwork(FORMS)
    return bench, run_trials(*a_workplace(bench, seconds), [1, 8])


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


def test_what_merges_in_a_precision_that_saves_no_time_is_not_even_timed():
    bench: Any = Clockwork({"full": 1.0, "full-bf16": 1.3, "half-bf16": 0.4, "full-int8": 0.5})
    found = run_trials(*a_workplace(bench, 1_000), [1, 8])

    assert dict(found.slow_precisions) == pytest.approx({"BF16": 1.3})
    assert [trial.point.name for trial in found.trials] == ["full", "full-int8"]
    assert found.row_seconds.keys() == {"full", "full-int8"}


def compiled_within(monkeypatch, seconds, names, failing=()):
    """Compile kept points, each of which takes 100 seconds to; some fail."""
    bench: Any = Clockwork({name: FORMS[name] for name in names})
    bench, judge, timer = a_workplace(bench, seconds)
    kept = run_trials(bench, judge, timer, [1, 8]).trials

    def apart(order, budget):
        if budget.left() < 100:
            return CompileResult(failed=compiling.OUT_OF_TIME)
        bench.now += 100
        return CompileResult(failed="it has no way") if order.spec.name in failing else CompileResult(name="inductor-0")

    monkeypatch.setattr(compiling, "_apart", apart)
    monkeypatch.setattr(compiling, "CompileRequest", lambda spec, folder: SimpleNamespace(spec=spec, folder=folder))
    return kept, compiling.compiled(bench, kept, judge, timer, [1, 8], Path())


def test_a_compiled_form_is_kept_where_it_is_measured_faster_and_else_refused_with_the_ratio(monkeypatch):
    kept, found = compiled_within(monkeypatch, 10_000, ["full", "half", "third"])

    assert [(trial.point.name, trial.point.compiled) for trial in found.trials] == [("full-compiled", "inductor-0")]
    assert found.trials[0].row_seconds == pytest.approx(0.9)
    assert found.refused == {
        "half": "compiled it takes 0.98 × its time, which is less than 5% faster",
        "third": "compiled it takes 1.10 × its time, which is no faster",
    }
    choice = choose([*kept, *found.trials], floor=0.5)
    assert [trial.point.name for trial in choice.kept] == ["full", "third"], "the accuracies are all alike"


def test_points_are_compiled_while_there_is_time_and_else_it_is_said_why_not(monkeypatch):
    kept, found = compiled_within(monkeypatch, 700, ["full", "half"], failing={"full"})

    assert [trial.point.name for trial in kept] == ["full", "half"]
    assert (list(found.trials), found.refused["full"]) == ([], "it has no way")
    _, found = compiled_within(monkeypatch, 200, ["full"])
    assert found.refused == {"full": "the seconds were over (--seconds)"}


def test_whole_numbers_of_eight_bits_are_not_compiled(monkeypatch):
    bench: Any = Clockwork({"full-int8": 0.5})
    bench, judge, timer = a_workplace(bench, 1_000)
    trial = Trial(bench.points[0], Accuracy(value=1.0), {1: 0.5})

    found = compiling.compiled(bench, [trial], judge, timer, [1], Path())
    assert found.refused == {"full-int8": "the kernels of INT8 are not compiled"}


def test_a_compiler_is_ended_with_the_budget(tmp_path):
    order = CompileRequest(spec=a_spec(), folder=tmp_path)

    began = time.monotonic()
    assert compiling._apart(order, TimeBudget(0.2)).failed == compiling.OUT_OF_TIME
    assert time.monotonic() - began < 30, "it would take longer to import torch, let alone to compile"


@pytest.mark.parametrize(
    ("gpu", "processor", "tried_in", "not_tried"),
    [
        ("None", {"avx2"}, ["BF16", "INT8"], {"FP16": "not tried: no AVX512-FP16 or AMX-FP16 here"}),
        ("None", {"avx512_fp16"}, ["BF16", "FP16", "INT8"], {}),
        ("None", {"asimd"}, ["BF16", "INT8"], {"FP16": "not tried: no ASIMDHP here"}),
        ("Here", {"avx2"}, ["BF16", "FP16"], {"INT8": "not tried: its kernels run on cores alone, not on a GPU"}),
        (
            "Elsewhere",
            {"avx2"},
            ["BF16"],
            {
                "FP16": "not tried: no AVX512-FP16 or AMX-FP16 here",
                "INT8": "not tried: its kernels run on cores alone, not on a GPU",
            },
        ),
    ],
)
def test_precisions_are_tried_where_something_here_multiplies_in_them(gpu, processor, tried_in, not_tried):
    machine = TuningHardware(gpu, frozenset(processor))

    assert worth_trying(machine) == tried_in
    assert untried(machine) == not_tried


@pytest.mark.parametrize(
    ("gpu", "processor", "words"),
    [
        ("None", {"avx2"}, "BF16 takes the model 4.02 × as long: no AVX512-BF16 or AMX-BF16 here"),
        ("None", {"asimd"}, "BF16 takes the model 4.02 × as long: no BF16 here"),
        ("None", {"avx512_bf16"}, "BF16 takes the model 4.02 × as long, though this processor has AVX512-BF16"),
        (
            "None",
            set(),
            "BF16 takes the model 4.02 × as long: nobody tells what this processor multiplies in",
        ),
        ("Here", set(), "BF16 takes the model 4.02 × as long on this GPU"),
    ],
)
def test_a_precision_that_saves_no_time_is_told_with_its_ratio_and_what_is_missing_here(gpu, processor, words):
    assert why_not_faster("BF16", 4.02, TuningHardware(gpu, frozenset(processor))) == words
