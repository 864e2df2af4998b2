"""Compilation of selected points: each in a subprocess, timed alongside its plain form, and evaluated."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.measurement import QualityEvaluator, TimeBudget, Timer
from trimtab.tuning.selection import MIN_GAIN, Trial
from trimtab_model_servers.compile_worker import CompileRequest, CompileResult
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.compiled import compiler_problem
from trimtab_pipelines.processes.child_process import SAFE_PATH
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

MODULE = "trimtab_model_servers.compile_worker"
OUT_OF_TIME = "no time left (--seconds)"


@dataclass(frozen=True, slots=True)
class Compilations:
    """Trials of compiled points, and the reasons why others have none, by point name."""

    trials: Sequence[Trial]
    rejected: Mapping[str, str]


def why_not_compiled(model: CandidateModel) -> str:
    """Return why no point of a model can be compiled here; empty if points can."""
    if model.gpu != "None":
        return "compiled forms run on CPUs, and the variant requests a GPU"
    folder = model.folder
    if folder is None:
        return "compiled forms are stored next to the weights, which are not a local file"
    if not os.access(folder, os.W_OK):
        return f"compiled forms are stored next to the weights, and {folder} is not writable"
    return compiler_problem()


def compile_points(
    model: CandidateModel,
    trials: Sequence[Trial],
    evaluator: QualityEvaluator,
    timer: Timer,
    batches: Sequence[int],
    folder: Path,
) -> Compilations:
    """Compile points into `folder` and measure them, in their order, until the timer's budget is spent."""
    compiled, rejected = [], {}
    for trial in trials:
        timer.on_progress(f"compiling {trial.point.name}")
        outcome = _compile(model, trial, evaluator, timer, batches, folder)
        if isinstance(outcome, Trial):
            compiled.append(outcome)
        else:
            rejected[trial.point.name] = outcome
    return Compilations(compiled, rejected)


def _compile(
    model: CandidateModel, trial: Trial, evaluator: QualityEvaluator, timer: Timer, batches: Sequence[int], folder: Path
) -> Trial | str:
    """Return the trial of a point's compiled form, or the reason why there is none."""
    plain, budget = trial.point, timer.budget
    if plain.precision == "INT8":
        return "INT8 kernels are not compiled"
    result = compile_in_subprocess(CompileRequest(spec=model.spec_at(plain), folder=folder), budget)
    if result.failed:
        return result.failed
    point = plain.replace(name=f"{plain.name}-compiled", compiled=result.name)
    try:
        model.add_point(point, plain.name, folder)
    except ModelError as error:
        return str(error)
    seconds = timer.by_batch([plain, point], batches, share=1.0)
    ratios = {batch: compiled / seconds[plain.name][batch] for batch, compiled in seconds[point.name].items()}
    if (ratio := ratios[max(ratios)]) > 1 - MIN_GAIN:
        gain = f"less than {MIN_GAIN:.0%} faster" if ratio < 1 else "not faster"
        return f"{gain}: {ratio:.2f} × the time of the plain point"
    quality = evaluator.evaluate(point, budget)
    if quality is None:
        return f"{ratio:.2f} × the time of the plain point, but not evaluated within --seconds"
    # The other points were timed earlier, under other load: the plain point's time is scaled by the measured ratio.
    scaled = {batch: plain_seconds * ratios.get(batch, ratio) for batch, plain_seconds in trial.seconds.items()}
    return Trial(point, quality.accuracy, scaled, quality.by_task)


def compile_in_subprocess(request: CompileRequest, budget: TimeBudget) -> CompileResult:
    """Compile in a subprocess, which is killed when the budget is spent."""
    if budget.over():
        return CompileResult(failed=OUT_OF_TIME)
    variables = {SAFE_PATH: "1", "TORCHINDUCTOR_CACHE_DIR": str(request.folder / "cache")}
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
        output, errors = process.communicate(request.model_dump_json(by_alias=True), timeout=budget.left())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        process.communicate()
        return CompileResult(failed=OUT_OF_TIME)
    try:
        return CompileResult.model_validate_json(output.splitlines()[-1])
    except (ValidationError, IndexError):
        last = (errors.splitlines() or ["no output"])[-1]
        return CompileResult(failed=f"the compiler ended with {process.returncode}: {last}")
