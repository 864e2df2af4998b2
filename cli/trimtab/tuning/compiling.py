"""Kept points, compiled: each in a process of its own, timed beside itself as it was, and judged like any other."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import LEAST_GAIN, Trial
from trimtab.tuning.timing import Timer
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.compiled import compiler_missing
from trimtab_pipelines.processes.child_process import SAFE_PATH
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

MODULE = "trimtab_model_servers.compile_worker"
OUT_OF_TIME = "the seconds were over (--seconds)"


@dataclass(frozen=True, slots=True)
class Compilations:
    """What came of compiling: the trials of forms that save time, and why there are no others, by the points' names."""

    trials: Sequence[Trial]
    refused: Mapping[str, str]


def why_not_compiled(bench: CandidateModel) -> str:
    """Why no point of a bench can have a compiled form here; empty where points can."""
    if bench.gpu != "None":
        return "they are for cores alone, and the variant asks for a GPU"
    folder = bench.folder
    if folder is None:
        return "they lie beside the weights, which are no file here"
    if not os.access(folder, os.W_OK):
        return f"they lie beside the weights, and {folder} cannot be written to"
    return compiler_missing()


def compiled(
    bench: CandidateModel,
    kept: Sequence[Trial],
    judge: QualityEvaluator,
    timer: Timer,
    batches: Sequence[int],
    folder: Path,
) -> Compilations:
    """Compile each of some points, in their order, as long as the timer's budget lasts.

    Args:
        bench: that ran them.
        kept: what is worth compiling.
        judge: of their answers.
        timer: of their latencies.
        batches: that they are timed at.
        folder: where forms are written for now.
    """
    trials, refused = [], {}
    for trial in kept:
        timer.show(f"compiling {trial.point.name}")
        found = _compiled(bench, trial, judge, timer, batches, folder)
        if isinstance(found, Trial):
            trials.append(found)
        else:
            refused[trial.point.name] = found
    return Compilations(trials, refused)


def _compiled(
    bench: CandidateModel, trial: Trial, judge: QualityEvaluator, timer: Timer, batches: Sequence[int], folder: Path
) -> Trial | str:
    """A point's compiled form as it was measured, or why there is none worth having."""
    plain, budget = trial.point, timer.budget
    if plain.precision == "INT8":
        return "the kernels of INT8 are not compiled"
    answer = _apart(CompileRequest(spec=bench.spec_at(plain), folder=folder), budget)
    if answer.failed:
        return answer.failed
    point = plain.model_copy(update={"name": f"{plain.name}-compiled", "compiled": answer.name})
    try:
        bench.join(point, plain.name, folder)
    except ModelError as error:
        return str(error)
    seconds = timer.by_batch([plain, point], batches, share=1.0)
    ratios = {batch: taken / seconds[plain.name][batch] for batch, taken in seconds[point.name].items()}
    if (ratio := ratios[max(ratios)]) > 1 - LEAST_GAIN:
        less = f"less than {LEAST_GAIN:.0%} faster" if ratio < 1 else "no faster"
        return f"compiled it takes {ratio:.2f} × its time, which is {less}"
    judgement = judge.evaluate(point, budget)
    if judgement is None:
        return f"compiled it takes {ratio:.2f} × its time, but was not judged when the seconds were over (--seconds)"
    # Rounds of other forms are some time ago: what counts beside them is by how much it is faster than itself.
    scaled = {batch: taken * ratios.get(batch, ratio) for batch, taken in trial.seconds.items()}
    return Trial(point, judgement.accuracy, scaled, judgement.by_task)


def _apart(order: CompileRequest, budget: TimeBudget) -> CompileResult:
    """Have an order carried out in a process of its own, which ends with the budget."""
    if budget.over():
        return CompileResult(failed=OUT_OF_TIME)
    variables = {SAFE_PATH: "1", "TORCHINDUCTOR_CACHE_DIR": str(order.folder / "cache")}
    process = subprocess.Popen(
        command_tied_to_parent(MODULE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        told, errors = process.communicate(order.model_dump_json(by_alias=True), timeout=budget.left())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        process.communicate()
        return CompileResult(failed=OUT_OF_TIME)
    try:
        return CompileResult.model_validate_json(told.splitlines()[-1])
    except (ValidationError, IndexError):
        last = (errors.splitlines() or ["without a word"])[-1]
        return CompileResult(failed=f"its compiler ended with {process.returncode}: {last}")
