"""Rows of a stage over time by the point that answered them, as a run measured them and as its plans expected them."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.local.counters import rows_since
from trimtab.report.series import Curve, bins
from trimtab.run_samples import Run
from trimtab_pipelines.escalation import Key
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_shares import AnsweredBy, Escalated, Rows, answered_rows
from trimtab_pipelines.shadow_price import row_seconds


@dataclass(frozen=True, slots=True)
class RowBin:
    """Rows of a stage in a time span, in seconds from the start of the load."""

    start: float
    end: float
    served: Mapping[Key, float]
    escalated: Escalated
    plan: StagePlan | None
    """The stage's plan at the start."""

    @property
    def answered(self) -> dict[AnsweredBy, float]:
        return answered_rows(self.served, self.escalated)

    @property
    def saved_seconds(self) -> dict[str, float]:
        """Replica seconds by which cascades were shorter than their second variant alone, by that variant.

        By the plan's service times of full batches.
        """
        saved: defaultdict[str, float] = defaultdict(float)
        seconds = {} if self.plan is None else row_seconds(self.plan)
        for (first, second), count in self.escalated.items():
            if count and {first, second} <= seconds.keys():
                passed_on = sum(rows for (source, _), rows in self.escalated.items() if source == first)
                served_again = sum(rows for (_, target), rows in self.escalated.items() if target == first)
                rows = (self.served.get(first, 0.0) - served_again) * count / passed_on
                saved[second[0]] += (rows - count) * seconds[second] - rows * seconds[first]
        return dict(saved)


def row_bins(run: Run, stage: str) -> list[RowBin]:
    """Time spans of a run with the rows of a stage; empty if the record has no rows."""
    edges, _ = bins(run)
    at = [sample.at - run.started_at for sample in run.samples]
    nearest = sorted({min(int(np.searchsorted(at, edge)), len(at) - 1) for edge in edges}) if at else []
    starts = [plan.spec.created_at - run.started_at for plan in run.plans]
    spans = []
    for first, last in pairwise(nearest):
        served, escalated = rows_since(run.samples[first].counters, run.samples[last].counters, stage)
        in_force = bisect_right(starts, at[first]) - 1
        planned = run.plans[max(in_force, 0)].spec.stage(stage) if run.plans else None
        if served:
            spans.append(RowBin(at[first], at[last], served, escalated, planned))
    return spans


def total_rows(spans: Sequence[RowBin]) -> Counter[AnsweredBy]:
    rows: Counter[AnsweredBy] = Counter()
    for span in spans:
        rows.update(span.answered)
    return rows


def expected_rows(spans: Sequence[RowBin]) -> Counter[AnsweredBy]:
    """The spans' rows, divided as the plans expected."""
    rows: Counter[AnsweredBy] = Counter()
    for span in spans:
        if span.plan is not None:
            total = sum(span.answered.values())
            rows.update({key: share * total for key, share in span.plan.expected_rows.items()})
    return rows


def share_curves(run: Run, stage: str, spans: Sequence[RowBin]) -> dict[AnsweredBy, tuple[Curve, Curve]]:
    """Measured and expected shares by the point that answers the rows, the least accurate variant first."""
    accuracies = {(v.name, p.name): p.accuracy for v in run.pipeline.spec.stage(stage).variants for p in v.points}
    keys = {*total_rows(spans), *expected_rows(spans)}
    ordered = sorted(keys, key=lambda key: (accuracies.get(key[:2], 0.0), key))
    middles = np.array([(span.start + span.end) / 2 for span in spans])
    return {
        key: (
            Curve(middles, np.array([_share(span.answered, key) for span in spans])),
            Curve(middles, np.array([_share(span.plan.expected_rows, key) if span.plan else np.nan for span in spans])),
        )
        for key in ordered
    }


def _share(rows: Rows, key: AnsweredBy) -> float:
    total = sum(rows.values())
    return rows.get(key, 0.0) / total if total else np.nan
