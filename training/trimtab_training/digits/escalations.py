"""Calibrations of the digits networks, and escalations between variants, from the rows of an evaluation.

Calibrations and thresholds are chosen on a third of the pages; their figures are those of the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from trimtab_model_servers.families.digits import Calibration
from trimtab_pipelines.accuracy_evidence import mean_confidence
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.escalation_evidence import ScoredRows, held_out_escalations
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations
from trimtab_training.confidence_fitting import calibration_error
from trimtab_training.digits.evaluate import Measurement

STAGES: Final = ("locate", "read")
_SKEW: Final = 5.0
Rows = Mapping[str, ScoredRows]


@dataclass(frozen=True, slots=True, eq=False)
class StageEvidence:
    """Calibrations and escalations of one stage's variants."""

    calibrations: Mapping[str, Calibration]
    rows: Rows
    """With calibrated confidences."""
    chosen_on: NDArray[np.bool_]
    """Rows that calibrations and thresholds are chosen on."""
    escalations: Mapping[tuple[str, str], tuple[Escalation, ...]]

    @classmethod
    def of(cls, measurement: Measurement, stage: str) -> "StageEvidence":
        raw = {name: rows for name, rows in measurement.rows.items() if name.startswith(stage)}
        pages = np.arange(next(iter(raw.values())).total.size) if stage == "locate" else measurement.page_of_crop
        chosen_on = pages % 3 == 0
        calibrations = {name: fit_calibration(rows.subset(chosen_on)) for name, rows in raw.items()}
        rows = {name: calibrated(own, calibrations[name]) for name, own in raw.items()}
        seconds = {(name, "default"): measurement.seconds[name] for name in rows}
        found = held_out_escalations({(name, "default"): own for name, own in rows.items()}, chosen_on, seconds)
        return cls(calibrations, rows, chosen_on, found)

    def calibration_entry(self, variant: str) -> dict[str, float]:
        """Parameters and the calibration error on the other pages, as `accuracy.json` holds them."""
        rows = self.rows[variant].subset(~self.chosen_on).sample()
        error = round(calibration_error(rows.confidence, rows.right), 4)
        return {**asdict(self.calibrations[variant]), "error": error}

    def options(self, seconds: Mapping[str, float]) -> Iterator[tuple[str, float, float, float]]:
        """Name, share escalated, accuracy, and seconds of a row, of each variant and escalation."""
        for name, rows in self.rows.items():
            yield name, 0.0, rows.subset(~self.chosen_on).accuracy, seconds[name]
            for again in self.escalations[name, "default"]:
                cost = seconds[name] + again.share * seconds[again.target(name)[0]]
                yield f"{name}, then {again.variant}", again.share, again.accuracy, cost

    def largest_skew(self, labels: NDArray[np.int64]) -> float:
        """Largest change of an escalation's accuracy if either half of the classes is five times as frequent."""
        changes = [0.0]
        for weights in (np.where(labels < 5, _SKEW, 1.0), np.where(labels < 5, 1.0, _SKEW)):
            for (first, _), listed in self.escalations.items():
                for again in listed:
                    rows = self.rows[first].escalated(self.rows[again.target(first)[0]], again.confidence_below)
                    changes.append(abs(float(np.average(rows.correct, weights=weights)) - again.accuracy))
        return max(changes)


def fit_calibration(rows: ScoredRows) -> Calibration:
    """Fit the logistic calibration of uncalibrated confidences to whether all of a row's results are correct."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - slow to import

    logits = torch.from_numpy(rows.confidence).double().logit(1e-6).numpy()
    fitted = LogisticRegression(C=1e6).fit(logits[:, None], rows.sample().right)
    return Calibration(round(float(fitted.intercept_[0]), 3), round(float(fitted.coef_[0, 0]), 3))


def calibrated(rows: ScoredRows, calibration: Calibration) -> ScoredRows:
    return replace(rows, confidence=calibration.apply(torch.from_numpy(rows.confidence)).numpy())


def write_evidence(path: Path, measurement: Measurement, evidence: Mapping[str, StageEvidence]) -> None:
    """Write accuracies, mean confidences and escalations into the pipeline file, if it exists."""
    if not path.exists():
        return
    accuracies, escalations = {}, {}
    for stage, found in evidence.items():
        for name, rows in found.rows.items():
            key, mean = (stage, name, "default"), mean_confidence(rows.confidence.tolist())
            accuracies[key] = measurement.stages[name].model_copy(update={"mean_confidence": mean})
            escalations[key] = found.escalations[name, "default"]
    text = with_accuracies(path.read_text(encoding="utf-8"), accuracies)
    write_atomically(path, with_escalations(text, escalations))


def print_options(measurement: Measurement, evidence: Mapping[str, StageEvidence]) -> None:
    """Print accuracy and processor time of each variant and escalation, cheapest first, and the effect of a skew."""
    for stage, found in evidence.items():
        table = Table(stage, "share", "accuracy", "µs a row")
        for name, share, accuracy, seconds in sorted(found.options(measurement.seconds), key=lambda option: option[3]):
            table.add_row(name, f"{share:.0%}" if share else "", f"{accuracy:.4f}", f"{1e6 * seconds:.0f}")
        Console().print(table)
    skew = evidence["read"].largest_skew(measurement.label_of_crop)
    Console().print(f"largest change of accuracy with classes skewed {_SKEW:g} : 1: {100 * skew:.1f} points")
