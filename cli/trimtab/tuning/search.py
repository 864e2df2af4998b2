"""Search for operating points: trials of all candidates, compilation of the selected ones, and a final selection."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.candidates import (
    FULL,
    TuningHardware,
    candidate_points,
    precisions_to_try,
    why_not_faster,
    why_not_tried,
)
from trimtab.tuning.compiling import Compilations, compile_points, why_not_compiled
from trimtab.tuning.measurement import OnProgress, QualityEvaluator, TimeBudget, Timer, TrialResults, run_trials
from trimtab.tuning.selection import Selection, Trial, choose, metric_name
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.transformer.compiled import instructions
from trimtab_model_servers.transformer.merging import RULES
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

LARGEST_BATCH = 16
EVALUATION_SHARE = 0.75
"""Share of the time budget after which the points selected so far are compiled."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Candidates of a model on this machine."""

    points: Sequence[OperatingPoint]
    machine: TuningHardware
    why_uncompiled: str
    """Why no point can be compiled; empty if points can."""

    @classmethod
    def of(cls, document: InferencePipeline, home: Path) -> Self:
        """Determine the candidates of a pipeline of one stage with one variant; the model is released afterwards."""
        full = CandidateModel(document, home, [FULL])
        machine = TuningHardware(full.gpu, instructions())
        points = candidate_points(*full.layers, list(RULES), precisions_to_try(machine))
        return cls(points, machine, why_not_compiled(full))


@dataclass(frozen=True, slots=True)
class Search:
    """Search for points of a pipeline of one stage with one variant."""

    document: InferencePipeline
    home: Path
    """Base of relative storage URIs."""
    samples: LabelledPayloads
    count: int
    """Number of samples to evaluate on."""
    floor: float
    """Share of the full model's accuracy that points must reach, 0…1."""

    @property
    def batches(self) -> list[int]:
        sizes = self.document.spec.stages[0].batch_sizes
        return sorted({1, *(size for size in sizes if size <= min(LARGEST_BATCH, self.count))})

    def run(self, space: SearchSpace, budget: TimeBudget, on_progress: OnProgress) -> "SearchResult":
        """Try every candidate, compile the selected ones, and select among all."""
        model = CandidateModel(self.document, self.home, space.points)
        largest = [self.samples.payload(index) for index in range(max(self.batches))]
        timer = Timer(model, largest, on_progress, budget)
        evaluator = QualityEvaluator(model, self.samples, self.count, max(self.batches))
        with TemporaryDirectory(prefix="trimtab-tune-") as name:
            folder = Path(name)
            share = 1.0 if space.why_uncompiled else EVALUATION_SHARE
            results = run_trials(model, evaluator, timer, self.batches, share)
            candidates = () if space.why_uncompiled else choose(results.trials, self.floor).selected
            compilations = compile_points(model, candidates, evaluator, timer, self.batches, folder)
            selection = choose([*results.trials, *compilations.trials], self.floor)
            model.install_compiled([trial.point for trial in selection.selected], folder)
        return SearchResult(space, results, compilations, selection)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search, as a table, messages and figures."""

    space: SearchSpace
    results: TrialResults
    compilations: Compilations
    selection: Selection

    @property
    def trials(self) -> Sequence[Trial]:
        """All timed and evaluated points, the full model first."""
        return [*self.results.trials, *self.compilations.trials]

    @property
    def row_seconds(self) -> Mapping[str, float]:
        """Seconds of a row in the largest batch, of all timed points by name."""
        compiled = {trial.point.name: trial.row_seconds for trial in self.compilations.trials}
        return {**self.results.row_seconds, **compiled}

    def speed_up(self, name: str) -> float:
        """Speed of a point relative to the full model."""
        return self.row_seconds[FULL.name] / self.row_seconds[name]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("point", self.metric, "95 % interval", "confidence", "ms per row", "speed-up", "decision")

    @property
    def metric(self) -> str:
        return metric_name(self.trials[0].accuracy)

    def rows(self, seconds: float) -> Iterator[tuple[str, ...]]:
        """Yield a row for each timed point; `seconds` is the time budget."""
        for trial in self.trials:
            name, accuracy = trial.point.name, trial.accuracy
            interval = f"{accuracy.low:.4f} – {accuracy.high:.4f}"
            confidence = "" if accuracy.mean_confidence is None else f"{accuracy.mean_confidence:.4f}"
            decision = self.selection.rejected.get(name, "selected")
            yield name, f"{accuracy.value:.4f}", interval, confidence, *self._times(name), decision
        out_of_time = dict.fromkeys(self.results.unevaluated, f"not evaluated within --seconds {seconds:g}")
        for name, reason in (*self.results.slow.items(), *out_of_time.items()):
            yield name, "", "", "", *self._times(name), reason

    def _times(self, name: str) -> tuple[str, str]:
        return f"{1000 * self.row_seconds[name]:.2f}", f"{self.speed_up(name):.2f}"

    def exclusions(self) -> Iterator[str]:
        """Yield the reasons why precisions were not tried or selected, and why points are not compiled."""
        for precision, reason in why_not_tried(self.space.machine).items():
            yield f"{precision} not tried: {reason}"
        for precision, ratio in self.results.slow_precisions.items():
            yield f"{precision} rejected: {why_not_faster(precision, ratio, self.space.machine)}"
        for name, reason in self.compilations.rejected.items():
            yield f"{name} not compiled: {reason}"
        if self.space.why_uncompiled:
            yield f"no point compiled: {self.space.why_uncompiled}"

    def figures(self) -> dict[str, float]:
        selected, unevaluated = self.selection.selected, len(self.results.unevaluated)
        tried = len(self.results.trials) + len(self.results.slow) + len(self.results.slow_precisions)
        figures: dict[str, float] = {
            "tried": tried,
            "unevaluated": unevaluated,
            "untimed": len(self.space.points) - tried - unevaluated,
            "compiled": len(self.compilations.trials),
            "selected": len(selected),
            "samples": selected[0].accuracy.samples or 0,
        }
        accuracies = {trial.point.name: trial.accuracy.value for trial in selected}
        figures |= {f"{name}_{self.metric}": value for name, value in accuracies.items()}
        return figures | {f"{name}_speed_up": round(self.speed_up(name), 3) for name in accuracies}
