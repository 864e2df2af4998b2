"""Figures and thresholds of tests. A run that has any ends with one line of JSON, which holds those of all tests."""

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab_pipelines.result_line import Direction, ResultLine, Threshold, threshold

FIGURES, THRESHOLDS = "figures", "thresholds"


class Figures:
    """What one test measured; pytest keeps it as properties of the test, also in the reports of xdist's workers."""

    def __init__(self, test: str, properties: list[tuple[str, object]], *, functional: bool) -> None:
        self._test = test.removeprefix("test_")
        self._properties = properties
        self._functional = functional

    def add(self, **figures: float | str | None) -> None:
        """Report figures; units stand in their names."""
        named = {f"{self._test}.{name}": value for name, value in figures.items()}
        self._properties.append((FIGURES, named))

    def require(
        self, name: str, value: float, direction: Direction, bound: float, *, depends_on_load: bool = False
    ) -> None:
        """Report a threshold, and fail unless it holds. One that depends on load fails nothing with --functional."""
        reached = threshold(f"{self._test}: {name}", value, direction, bound)
        self._properties.append((THRESHOLDS, reached.model_dump()))
        assert reached.holds or (depends_on_load and self._functional), f"{name}: {value:g}, not {reached.bound}"


def result_line(name: str, reports: Mapping[str, Iterable[Any]]) -> ResultLine | None:
    """Sum up the reports of a run by outcome; None if no test reported figures."""
    outcomes = ("passed", "failed", "skipped", "error")
    counts = {outcome: sum(1 for _ in reports.get(outcome, ())) for outcome in outcomes}
    ended = [report for outcome in outcomes for report in reports.get(outcome, ())]
    # A report of a collection has no properties.
    properties = [pair for report in ended for pair in getattr(report, "user_properties", ())]
    if not properties:
        return None
    figures: dict[str, float | int | str | None] = {f"tests_{outcome}": count for outcome, count in counts.items()}
    for kind, found in properties:
        figures |= found if kind == FIGURES else {}
    bars = tuple(Threshold.model_validate(found) for kind, found in properties if kind == THRESHOLDS)
    return ResultLine(name=name, figures=figures, bars=bars)
