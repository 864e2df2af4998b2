"""Search for operating points: trials of all candidates, compilation of the selected ones, and a final selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.candidates import FULL, candidate_points
from trimtab.tuning.compiling import Compilations, compile_points, why_not_compiled
from trimtab.tuning.precisions import TuningHardware, precisions_to_try
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import Selection, Trial, choose
from trimtab.tuning.timing import OnProgress, TimeBudget, Timer
from trimtab.tuning.trials import TrialResults, run_trials
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.transformer.compiled import instructions
from trimtab_model_servers.transformer.merging import RULES
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

LARGEST_BATCH = 16
EVALUATION_SHARE = 0.75
"""Share of the time budget after which the points selected so far are compiled."""


@dataclass(frozen=True, slots=True)
class SearchContext:
    """Candidates on this machine."""

    points: Sequence[OperatingPoint]
    machine: TuningHardware
    why_uncompiled: str
    """Why no point can be compiled; empty if points can."""


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
        """Batch sizes to time."""
        sizes = self.document.spec.stages[0].batch_sizes
        return sorted({1, *(size for size in sizes if size <= min(LARGEST_BATCH, self.count))})

    def run(self, context: SearchContext, budget: TimeBudget, on_progress: OnProgress) -> "SearchResult":
        """Try every candidate, compile the selected ones, and select among all."""
        model = CandidateModel(self.document, self.home, context.points)
        largest = [self.samples.payload(index) for index in range(max(self.batches))]
        timer = Timer(model, largest, on_progress, budget)
        evaluator = QualityEvaluator(model, self.samples, self.count, max(self.batches))
        with TemporaryDirectory(prefix="trimtab-tune-") as name:
            folder = Path(name)
            share = 1.0 if context.why_uncompiled else EVALUATION_SHARE
            results = run_trials(model, evaluator, timer, self.batches, share)
            candidates = () if context.why_uncompiled else choose(results.trials, self.floor).selected
            compilations = compile_points(model, candidates, evaluator, timer, self.batches, folder)
            selection = choose([*results.trials, *compilations.trials], self.floor)
            model.install_compiled([trial.point for trial in selection.selected], folder)
        return SearchResult(results, compilations, selection)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search."""

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
    def tried(self) -> int:
        """Number of points tried, excluding compiled ones."""
        return len(self.results.trials) + len(self.results.slow) + len(self.results.slow_precisions)


def search_context(document: InferencePipeline, home: Path) -> SearchContext:
    """Determine the candidates of a model; the model is released afterwards."""
    full = CandidateModel(document, home, [FULL])
    machine = TuningHardware(full.gpu, instructions())
    return SearchContext(
        candidate_points(*full.layers, list(RULES), precisions_to_try(machine)), machine, why_not_compiled(full)
    )
