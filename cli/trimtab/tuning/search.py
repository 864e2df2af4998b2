"""The search for points: what can be tried here, then each form tried, and what is kept compiled too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.candidates import FULL, candidate_points
from trimtab.tuning.compiling import Compilations, compiled, why_not_compiled
from trimtab.tuning.precisions import TuningHardware, worth_trying
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import Selection, Trial, choose
from trimtab.tuning.timing import Show, Timer
from trimtab.tuning.trials import TrialResults, run_trials
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.cpu_features import instructions
from trimtab_model_servers.transformer.merge_rules import RULES
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipeline

LARGEST_BATCH = 16
JUDGING_SHARE = 0.75
"""Of the time there is, what may pass before the points that are kept by then are compiled."""


@dataclass(frozen=True, slots=True)
class SearchContext:
    """What can be tried here: forms, on which machine, and why none is compiled; empty where some can be."""

    points: Sequence[OperatingPoint]
    machine: TuningHardware
    uncompiled: str


@dataclass(frozen=True, slots=True)
class Search:
    """What to search among, and by what to judge.

    Attributes:
        document: the pipeline of the one stage and the one variant that is tried.
        home: the folder that its weights are named from.
        samples: of the stage's inputs.
        count: how many of them are judged by.
        floor: share of the model's accuracy that points must keep, 0…1.
    """

    document: InferencePipeline
    home: Path
    samples: LabelledPayloads
    count: int
    floor: float

    @property
    def batches(self) -> list[int]:
        """The batch sizes that forms are timed at."""
        sizes = self.document.spec.stages[0].batch_sizes
        return sorted({1, *(size for size in sizes if size <= min(LARGEST_BATCH, self.count))})

    def run(self, ground: SearchContext, budget: TimeBudget, show: Show) -> "SearchResult":
        """Try every form; what is kept of them compiled, too. `show` is told each step."""
        bench = CandidateModel(self.document, self.home, ground.points)
        largest = [self.samples.payload(index) for index in range(max(self.batches))]
        timer = Timer(bench, largest, show, budget)
        judge = QualityEvaluator(bench, self.samples, self.count, max(self.batches))
        with TemporaryDirectory(prefix="trimtab-forms-") as workshop:
            plain = run_trials(bench, judge, timer, self.batches, 1.0 if ground.uncompiled else JUDGING_SHARE)
            worth = () if ground.uncompiled else choose(plain.trials, self.floor).kept
            compilations = compiled(bench, worth, judge, timer, self.batches, Path(workshop))
            choice = choose([*plain.trials, *compilations.trials], self.floor)
            bench.install_compiled([trial.point for trial in choice.kept], Path(workshop))
        return SearchResult(plain, compilations, choice)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What came of a search."""

    plain: TrialResults
    compilations: Compilations
    choice: Selection

    @property
    def trials(self) -> Sequence[Trial]:
        """All forms that were timed and judged, the model as it is first."""
        return [*self.plain.trials, *self.compilations.trials]

    @property
    def row_seconds(self) -> Mapping[str, float]:
        """Of a row in the largest batch, of all forms that were timed, by name."""
        return {**self.plain.row_seconds, **{one.point.name: one.row_seconds for one in self.compilations.trials}}

    def speed_up(self, name: str) -> float:
        """How many times as fast as the model as it is a form is."""
        return self.row_seconds[FULL.name] / self.row_seconds[name]

    @property
    def tried(self) -> int:
        """How many forms something was found out about, compiled ones apart."""
        return len(self.plain.trials) + len(self.plain.slow) + len(self.plain.slow_precisions)


def search_context(document: InferencePipeline, home: Path) -> SearchContext:
    """Find out what can be tried of a document's model; it is not kept in memory."""
    first = CandidateModel(document, home, [FULL])
    machine = TuningHardware(first.gpu, instructions())
    return SearchContext(
        candidate_points(*first.layers, list(RULES), worth_trying(machine)), machine, why_not_compiled(first)
    )
