"""All that was simulated, by model, method and load, and what is judged of it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.mosel.cells import FREE, ONCE, OURS, WHOLE, Measured
from benchmarks.mosel.models import MODELS
from trimtab_pipelines.result_line import ResultLine, threshold

MOST_VIOLATIONS = 0.01
PAPER_LOAD = 1.0
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measured cells; `trace` says what the load is."""

    measured: Sequence[Measured]
    trace: str
    _by_cell: dict[tuple[str, str, float, float], list[Measured]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for one in self.measured:
            cell = one.cell
            self._by_cell[cell.model, cell.method, cell.factor, cell.misjudged].append(one)

    @property
    def factors(self) -> list[float]:
        """The loads, as multiples of the paper's."""
        return sorted({one.cell.factor for one in self.measured})

    def mean(
        self, model: str, method: str, of: Callable[[Measured], float], factor: float | None = None, wrong: float = 1.0
    ) -> float:
        """The mean over seeds, and over loads where none is named."""
        factors = self.factors if factor is None else [factor]
        return float(np.mean([of(one) for each in factors for one in self._by_cell[model, method, each, wrong]]))

    def carried_rps(self, model: str, method: str) -> float:
        """Queries a second answered in time at the highest load up to which at most 1 % of the jobs are not.

        Between the loads that were simulated it lies on the straight line.
        """
        carried, before = 0.0, 0.0
        for factor in self.factors:
            now = self.mean(model, method, _violations, factor)
            answered = self.mean(model, method, _answered, factor)
            if now > MOST_VIOLATIONS:
                share = (MOST_VIOLATIONS - before) / max(now - before, _ROUNDING)
                return carried + max(share, 0.0) * max(answered - carried, 0.0)
            carried, before = answered, now
        return carried


def _violations(one: Measured) -> float:
    return one.violations


def _answered(one: Measured) -> float:
    return one.answered_rps


def _met(one: Measured) -> float:
    return one.met


def judge(evaluation: Evaluation) -> ResultLine:
    """Judge ours, with nothing assumed of second looks, against MOSEL's; and each of our three ideas by itself."""
    figures: dict[str, float | int | str | None] = {"trace": evaluation.trace, "cells": len(evaluation.measured)}
    worse, better, wrong = 0, 0, 0.0
    for model in MODELS:
        name = model.name.lower()
        of = {
            (method, what): evaluation.mean(model.name, method, how)
            for method in (OURS, ONCE, WHOLE, FREE, "Mosel", "AllModalities")
            for what, how in (("violations", _violations), ("met", _met))
        }
        figures |= {f"{name}_{what}_{_key(method)}": value for (method, what), value in of.items()}
        lost = of[ONCE, "violations"] - of["Mosel", "violations"]
        gained = of[ONCE, "met"] - of["Mosel", "met"]
        worse += lost > _ROUNDING or gained < -_ROUNDING
        better += lost < -_ROUNDING and gained > _ROUNDING
        carried = {
            method: evaluation.carried_rps(model.name, method) for method in (OURS, ONCE, "Mosel", "AllModalities")
        }
        figures |= {f"{name}_carried_rps_{_key(method)}": rps for method, rps in carried.items()}
        right = evaluation.mean(model.name, OURS, _violations, 0.5)
        for misjudged in (0.5, 1.5):
            now = evaluation.mean(model.name, OURS, _violations, 0.5, misjudged)
            figures[f"{name}_violations_at_{misjudged:g}_times_the_latency"] = now
            wrong = max(wrong, now - right)
    bars = (
        threshold(
            "models on which MOSEL's policy is better in violations or in jobs that met both SLOs", worse, "==", 0
        ),
        threshold("models on which ours is better in both", better, ">=", 3),
        threshold("most violations added by latencies 50 % off, points", 100 * wrong, "<=", 2.0),
    )
    return ResultLine(name="reproduce-mosel", figures=figures, bars=bars)


def _key(method: str) -> str:
    names = {OURS: "ours", ONCE: "ours_one_look", WHOLE: "ours_whole_jobs", FREE: "ours_without_price"}
    return names.get(method, method.lower())
