"""All that was simulated, by load and method, and what is judged of it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.otas.ceiling import Ceiling
from benchmarks.otas.cells import SYNTHETIC
from benchmarks.otas.measured import Cell, Measured
from benchmarks.otas.methods import INFAAS, METHODS, OTAS, OURS, PETS, PETS_EVICTS, TOME, VPT
from benchmarks.otas.paper import PAPER
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

PAPER_LOAD = 1.0
Figures = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measured cells, and what each load allows; `trace` says what the bursty load is."""

    measured: Sequence[Measured]
    ceilings: Sequence[Ceiling]
    trace: str
    _by_cell: dict[tuple[str, str, float], list[Measured]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for one in self.measured:
            self._by_cell[one.cell.workload, one.cell.method, one.cell.factor].append(one)

    @property
    def settings(self) -> list[tuple[str, float]]:
        """Loads and factors."""
        return sorted({(one.cell.workload, one.cell.factor) for one in self.measured}, reverse=True)

    @property
    def workloads(self) -> list[str]:
        """The loads, the synthetic first."""
        return list(dict.fromkeys(workload for workload, _ in self.settings))

    def factors(self, workload: str) -> list[float]:
        """What a load was multiplied by, ascending."""
        return sorted(factor for name, factor in self.settings if name == workload)

    def mean(self, workload: str, method: str, of: Callable[[Measured], float], factor: float = PAPER_LOAD) -> float:
        """The mean over seeds."""
        return float(np.mean([of(one) for one in self._by_cell[workload, method, factor]]))

    def type_share(self, workload: str, method: str, place: int) -> float:
        """The mean share of one of the paper's four types, counted from 0."""
        return self.mean(workload, method, lambda one: one.types[place])

    def example(self, workload: str, method: str) -> Measured:
        """The first seed at the paper's load."""
        return min(self._by_cell[workload, method, PAPER_LOAD], key=lambda one: one.cell.seed)

    def ceiling(self, workload: str, factor: float = PAPER_LOAD) -> float:
        """The most utility that any policy could have with the paper's list: the mean over seeds."""
        wanted = (workload, factor)
        return float(np.mean([one.utility for one in self.ceilings if (one.cell.workload, one.cell.factor) == wanted]))

    def of_ceiling(self, workload: str, method: str, factor: float = PAPER_LOAD) -> float:
        """Which share of that a method has."""
        return self.mean(workload, method, lambda one: one.utility, factor) / self.ceiling(workload, factor)

    def most_gain(self, workload: str, rival: str, factor: float = PAPER_LOAD) -> float:
        """By how much more utility than another any policy could have, as a share of that."""
        return 1.0 / self.of_ceiling(workload, rival, factor) - 1.0

    def gain(self, workload: str, rival: str, factor: float = PAPER_LOAD, ours: str = OURS) -> float:
        """By how much more utility ours has than another, as a share of that."""
        pairs = (self.mean(workload, method, lambda one: one.utility, factor) for method in (ours, rival))
        own, other = pairs
        return own / other - 1.0


def cells(factors: Sequence[float], seeds: int, workloads: Sequence[str]) -> list[Cell]:
    """Every load, factor, method and seed."""
    return [
        Cell(workload, method, factor, seed)
        for workload in workloads
        for factor in factors
        for method in METHODS
        for seed in range(1, seeds + 1)
    ]


def judge(evaluation: Evaluation, more: Figures | None = None, bars: Sequence[Threshold] = ()) -> ResultLine:
    """Judge ours against the paper's gains over its baselines, and against OTAS as printed in every setting.

    Figures and bars of what was served come after those of what was simulated.
    """
    figures: Figures = {
        "trace": evaluation.trace,
        "cells": len(evaluation.measured),
        "queries": sum(one.queries for one in evaluation.measured),
    }
    for workload in evaluation.workloads:
        figures[f"{workload}_ceiling_utility"] = evaluation.ceiling(workload)
        for method, made in METHODS.items():
            key = f"{workload}_{key_of(method)}"
            figures[f"{key}_utility"] = evaluation.mean(workload, method, lambda one: one.utility)
            figures[f"{key}_type_1"] = evaluation.type_share(workload, method, 0)
            if method != OURS:
                figures[f"{workload}_gain_over_{key_of(method)}"] = evaluation.gain(workload, method)
                figures[f"{workload}_most_gain_over_{key_of(method)}"] = evaluation.most_gain(workload, method)
            if made.is_the_papers:
                figures[f"{key}_of_ceiling"] = evaluation.of_ceiling(workload, method)
    return ResultLine(name="reproduce-otas", figures=figures | (more or {}), bars=(*_bars(evaluation), *bars))


def _bars(evaluation: Evaluation) -> tuple[Threshold, ...]:
    least = min(evaluation.gain(workload, OTAS, factor) for workload, factor in evaluation.settings)
    fixed = min(
        evaluation.gain(workload, method, factor)
        for workload, factor in evaluation.settings
        for method in (TOME, VPT, PETS_EVICTS)
    )
    right = evaluation.type_share(SYNTHETIC, OURS, 0)
    return (
        threshold(
            "synthetic: utility over PetS-like, %", 100 * evaluation.gain(SYNTHETIC, PETS), ">=", _paper("over PetS")
        ),
        threshold(
            "synthetic: utility over INFaaS-like, %", 100 * evaluation.gain(SYNTHETIC, INFAAS), ">=", _paper("INFaaS")
        ),
        threshold("synthetic: right in time (type 1), %", 100 * right, ">=", 85.0),
        threshold("least utility over OTAS as printed in any setting, %", 100 * least, ">=", 1e-9),
        threshold(
            "least utility over fixed ToMe, VPT, PetS-like that evicts, in any setting, %", 100 * fixed, ">=", 1e-9
        ),
    )


def _paper(name: str) -> float:
    return next(100 * value for key, value in PAPER.items() if name in key)


def key_of(method: str) -> str:
    """A method's name as figures have it."""
    words = "".join(letter if letter.isalnum() else " " for letter in method.lower().replace("λ", "price"))
    return "_".join(words.split())
