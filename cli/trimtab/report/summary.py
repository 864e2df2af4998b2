"""A run in a few lines: in the terminal, and as the cards at the top of the page."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trimtab.chat_stats import KINDS, ChatStats
from trimtab.report.series import LATE, reasons
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_samples import Run
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.spec import ServiceLevel

MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class SummaryItem:
    """One figure to see at a glance."""

    label: str
    value: str
    detail: str = ""
    holds: bool | None = None
    """Whether a promise that belongs to the figure was kept; None where none does."""


def summary_items(run: Run) -> list[SummaryItem]:
    """Say what matters most, in the order of reading."""
    figures, spec = run_stats(run), run.pipeline.spec
    counts = " + ".join(f"{count} {name}" for name, count in figures.outcomes.items())
    # While a run goes on, requests are under way; at the end of a load of ours none is.
    going_on = run.results is None and figures.in_flight > 0
    under_way, sums = (f" + {figures.in_flight} under way", None) if going_on else ("", False)
    budget = spec.budget.cores
    changes = ", ".join(f"{stage} {count}×" for stage, count in figures.variant_changes.items())
    kept = figures.slo_fraction >= spec.slo.quantile
    return [
        SummaryItem("requests received", f"{figures.received:,}", f"= {counts}{under_way}", figures.accounted or sums),
        SummaryItem(
            "within the SLO",
            _percent(figures.slo_fraction),
            f"of {promised(spec.slo)}, all received count" + _left_out(figures.client_errors),
            kept,
        ),
        *_not_answered(run),
        SummaryItem(
            "accuracy measured",
            _four(figures.measured_accuracy),
            f"expected {_four(figures.expected_accuracy)}, by {accuracy_sources(spec.stages)} ones",
        ),
        SummaryItem("latency p99", _milliseconds(figures.p99_seconds), f"median {_milliseconds(figures.p50_seconds)}"),
        *_chat_cards(figures.chats, spec.slo),
        SummaryItem("load", f"{figures.load_low_rps:.1f} – {figures.load_high_rps:.1f}", "requests/s, over 5 s each"),
        SummaryItem(
            "mean cores", f"{figures.mean_cores:.2f}", f"of a budget of {budget:g}; at most {figures.max_cores:g}"
        ),
        SummaryItem("plan changes", str(figures.plan_changes), f"variant: {changes}" if changes else ""),
        *_stage_cards(run),
    ]


def promised(slo: ServiceLevel) -> str:
    """Say what a pipeline promises of an answer."""
    words = [f"{1000 * slo.latency_seconds:g} ms"]
    if slo.time_to_first_token_seconds is not None:
        words.append(f"{1000 * slo.time_to_first_token_seconds:g} ms to the first token")
    if slo.time_per_output_token_seconds is not None:
        words.append(f"{1000 * slo.time_per_output_token_seconds:g} ms between tokens")
    return ", ".join(words)


def _not_answered(run: Run) -> Iterator[SummaryItem]:
    """Say why, where requests of a load of ours have no answer."""
    if run.results is None:
        return
    lost = Counter(why for why in reasons(run.results) if why not in {"", LATE})
    if lost:
        words = ", ".join(f"{count}× {why}" for why, count in lost.most_common(MAX_REASONS))
        more = len(lost) - MAX_REASONS
        yield SummaryItem(
            "without an answer", f"{lost.total():,}", words + (f" and {more} other reasons" if more > 0 else "")
        )


def _chat_cards(chats: Mapping[str, ChatStats], slo: ServiceLevel) -> Iterator[SummaryItem]:
    """Say when answers began and how fast they went on, of chats with images apart from those without."""
    for modality, seen in chats.items():
        kind = KINDS[modality]
        share = "" if math.isnan(seen.in_time_fraction) else f", {_percent(seen.in_time_fraction)} of all in time"
        for what, p50, p99, most in (
            ("first token", seen.first_p50_seconds, seen.first_p99_seconds, slo.time_to_first_token_seconds),
            ("between tokens", seen.next_p50_seconds, seen.next_p99_seconds, slo.time_per_output_token_seconds),
        ):
            of = "" if most is None else f", {_milliseconds(most)} promised"
            counted = f"; {seen.answered:,} answers{share}" if what == "first token" else ""
            kept = None if most is None or math.isnan(p99) else p99 <= most
            yield SummaryItem(
                f"{what} p99, {kind}", _milliseconds(p99), f"median {_milliseconds(p50)}{of}{counted}", kept
            )


def _stage_cards(run: Run) -> Iterator[SummaryItem]:
    """Say where the time went."""
    for stage in run.pipeline.spec.ordered_stages:
        times = run.results.stage_times(stage.name) if run.results else None
        if times is not None:
            value = f"{_milliseconds(times.queue_p50)} + {_milliseconds(times.service_p50)}"
            high = f"p99 {_milliseconds(times.queue_p99)} + {_milliseconds(times.service_p99)}"
            detail = f"queued + served, median; {high}; {times.mean_batch_size:.1f} rows a batch"
            yield SummaryItem(f"stage {stage.name}", value, detail)


def print_summary(run: Run, console: Console) -> None:
    """Print a run's cards."""
    table = Table(box=None, show_header=False, pad_edge=False, title=f"{run.title}", title_justify="left")
    for card in summary_items(run):
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
    return [_row(run.title, run_stats(run)) for run in runs]


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print several runs of the same load, one a line."""
    table = Table(*COMPARED, box=None, pad_edge=False)
    for row in comparison_rows(runs):
        table.add_row(*row)
    console.print(table)


def _row(title: str, figures: RunStats) -> tuple[str, ...]:
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


def _left_out(client_errors: int) -> str:
    return f" but {client_errors} ended so by their callers' own doing" if client_errors else ""


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.2f} %"


def _four(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _milliseconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{1000 * value:.0f} ms"
