"""A run in a few lines: in the terminal, and as the cards at the top of the page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trimtab.report.figures import Figures, figures_of
from trimtab.timeline import Run
from trimtab_pipelines.accuracy import sources


@dataclass(frozen=True, slots=True)
class Card:
    """One figure to see at a glance."""

    label: str
    value: str
    detail: str = ""
    holds: bool | None = None
    """Whether a promise that belongs to the figure was kept; None where none does."""


def cards(run: Run) -> list[Card]:
    """Say what matters most, in the order of reading."""
    figures, spec = figures_of(run), run.pipeline.spec
    counts = " + ".join(f"{count} {name}" for name, count in figures.outcomes.items())
    # While a run goes on, requests are under way; at the end of a load of ours none is.
    going_on = run.results is None and figures.under_way > 0
    under_way, sums = (f" + {figures.under_way} under way", None) if going_on else ("", False)
    budget, slo_ms = spec.budget.cores, 1000 * spec.slo.latency_seconds
    changes = ", ".join(f"{stage} {count}×" for stage, count in figures.variant_changes.items())
    kept = figures.slo_fraction >= spec.slo.quantile
    return [
        Card("requests received", f"{figures.received:,}", f"= {counts}{under_way}", figures.accounted or sums),
        Card(
            "within the SLO",
            _percent(figures.slo_fraction),
            f"of {slo_ms:g} ms, all received count" + _left_out(figures.callers_faults),
            kept,
        ),
        Card(
            "accuracy measured",
            _four(figures.measured_accuracy),
            f"expected {_four(figures.expected_accuracy)}, by {sources(spec.stages)} ones",
        ),
        Card("latency p99", _milliseconds(figures.p99_seconds), f"median {_milliseconds(figures.p50_seconds)}"),
        Card("load", f"{figures.load_low_rps:.1f} – {figures.load_high_rps:.1f}", "requests/s, over 5 s each"),
        Card("mean cores", f"{figures.mean_cores:.2f}", f"of a budget of {budget:g}; at most {figures.most_cores:g}"),
        Card("plan changes", str(figures.plan_changes), f"variant: {changes}" if changes else ""),
        *_stage_cards(run),
    ]


def _stage_cards(run: Run) -> Iterator[Card]:
    """Say where the time went."""
    for stage in run.pipeline.spec.order:
        times = run.results.stage_times(stage.name) if run.results else None
        if times is not None:
            value = f"{_milliseconds(times.queue_p50)} + {_milliseconds(times.service_p50)}"
            high = f"p99 {_milliseconds(times.queue_p99)} + {_milliseconds(times.service_p99)}"
            detail = f"queued + served, median; {high}; {times.mean_batch_size:.1f} rows a batch"
            yield Card(f"stage {stage.name}", value, detail)


def print_summary(run: Run, console: Console) -> None:
    """Print a run's cards."""
    table = Table(box=None, show_header=False, pad_edge=False, title=f"{run.title}", title_justify="left")
    for card in cards(run):
        table.add_row(card.label, card.value, card.detail)
    console.print(table)


COMPARED = (
    "run",
    "received",
    "within the SLO",
    "measured accuracy",
    "expected",
    "p50",
    "p99",
    "mean cores",
    "dropped",
    "failed",
)


def comparison_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Say what matters of each of several runs of the same load; the columns are COMPARED."""
    return [_row(run.title, figures_of(run)) for run in runs]


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print several runs of the same load, one a line."""
    table = Table(*COMPARED, box=None, pad_edge=False)
    for row in comparison_rows(runs):
        table.add_row(*row)
    console.print(table)


def _row(title: str, figures: Figures) -> tuple[str, ...]:
    return (
        title,
        f"{figures.received:,}",
        _percent(figures.slo_fraction),
        _four(figures.measured_accuracy),
        _four(figures.expected_accuracy),
        _milliseconds(figures.p50_seconds),
        _milliseconds(figures.p99_seconds),
        f"{figures.mean_cores:.2f}",
        str(figures.outcomes.get("dropped", 0)),
        str(figures.outcomes.get("failed", 0)),
    )


def _left_out(callers_faults: int) -> str:
    return f" but {callers_faults} ended so by their callers' own doing" if callers_faults else ""


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.2f} %"


def _four(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _milliseconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{1000 * value:.0f} ms"
