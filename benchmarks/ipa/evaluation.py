"""All that an evaluation found, as tables and plots need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.ipa import verdict
from benchmarks.ipa.cells import OURS, Measured
from benchmarks.ipa.data import Recorded

PAPER_NAMES = {OURS: "IPA", "FA2-low": "FA2-low", "FA2-high": "FA2-high", "RIM": "RIM"}
"""Our methods' names in the paper's recorded runs."""


@dataclass(frozen=True)
class Evaluation:
    """All that was found."""

    measured: Sequence[Measured]
    swept: Sequence[Measured]
    solver_seconds: Mapping[tuple[int, int], tuple[float, float]]
    recorded: Mapping[tuple[str, str, str], Recorded]
    seeds: int
    excerpts: str

    @cached_property
    def results(self) -> dict[tuple[str, str, str], list[Measured]]:
        """The cells by (pipeline, workload, method), in the order of their seeds."""
        return verdict.by_method(self.measured)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every (pipeline, workload), in the order in which they were asked for."""
        return list(dict.fromkeys((pipeline, workload) for pipeline, workload, _ in sorted(self.results)))

    @property
    def pipelines(self) -> list[str]:
        """The pipelines, in that order."""
        return list(dict.fromkeys(pipeline for pipeline, _ in self.pairs))
