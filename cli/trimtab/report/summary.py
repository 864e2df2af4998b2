"""Summary of a run: in the terminal, and at the top of the report."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trimtab.local.counters import CHAT_LABELS, ChatStats
from trimtab.options import terminal_table
from trimtab.report.row_series import expected_rows, row_bins, total_rows
from trimtab.report.series import LATE, loss_reasons
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_samples import Run
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.row_shares import describe_shares, escalation_rate, have_several_points
from trimtab_pipelines.spec import ServiceLevel

MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class SummaryItem:
    """One figure of a summary."""

    label: str
    value: str
    detail: str = ""
    holds: bool | None = None
    """Whether the figure meets its target; None without one."""


def summary_items(run: Run) -> list[SummaryItem]:
    """Return the most important figures of a run, in reading order."""
    stats, spec = run_stats(run), run.pipeline.spec
    outcomes = " + ".join(f"{count} {name}" for name, count in stats.outcomes.items())
    # During a run, requests are in flight; at the end of a load of our own, none is.
    running = run.results is None and stats.in_flight > 0
    in_flight, complete = (f" + {stats.in_flight} in flight", None) if running else ("", False)
    changes = ", ".join(f"{stage} {count}×" for stage, count in stats.variant_changes.items())
    client_errors = f" except {stats.client_errors} client errors" if stats.client_errors else ""
    return [
        SummaryItem(
            "requests received", f"{stats.received:,}", f"= {outcomes}{in_flight}", stats.accounted or complete
        ),
        SummaryItem(
            "within the SLO",
            _percent(stats.slo_fraction),
            f"of all received{client_errors}; SLO {slo_text(spec.slo)}",
            stats.slo_fraction >= spec.slo.quantile,
        ),
        *_unanswered_items(run),
        SummaryItem(
            "measured accuracy",
            _accuracy(stats.measured_accuracy),
            f"expected {_accuracy(stats.expected_accuracy)} ({accuracy_sources(spec.stages)})",
        ),
        SummaryItem("p99 latency", _milliseconds(stats.p99_seconds), f"median {_milliseconds(stats.p50_seconds)}"),
        *_chat_items(stats.chats, spec.slo),
        SummaryItem("load", f"{stats.load_low_rps:.1f} – {stats.load_high_rps:.1f}", "requests/s, means over 5 s"),
        SummaryItem(
            "mean cores", f"{stats.mean_cores:.2f}", f"budget {spec.budget.cores:g}; maximum {stats.max_cores:g}"
        ),
        SummaryItem("plan changes", str(stats.plan_changes), f"variant: {changes}" if changes else ""),
        *_row_items(run),
        *_stage_items(run),
    ]


def slo_text(slo: ServiceLevel) -> str:
    targets = [f"{1000 * slo.latency_seconds:g} ms"]
    if slo.time_to_first_token_seconds is not None:
        targets.append(f"{1000 * slo.time_to_first_token_seconds:g} ms to the first token")
    if slo.time_per_output_token_seconds is not None:
        targets.append(f"{1000 * slo.time_per_output_token_seconds:g} ms between tokens")
    return ", ".join(targets)


def _unanswered_items(run: Run) -> Iterator[SummaryItem]:
    if run.results is None:
        return
    reasons = Counter(reason for reason in loss_reasons(run.results) if reason not in {"", LATE})
    if reasons:
        details = ", ".join(f"{count}× {reason}" for reason, count in reasons.most_common(MAX_REASONS))
        others = len(reasons) - MAX_REASONS
        suffix = f" and {others} other reasons" if others > 0 else ""
        yield SummaryItem("unanswered requests", f"{reasons.total():,}", details + suffix)


def _chat_items(chats: Mapping[str, ChatStats], slo: ServiceLevel) -> Iterator[SummaryItem]:
    for modality, stats in chats.items():
        label = CHAT_LABELS[modality]
        share = "" if math.isnan(stats.in_time_fraction) else f", {_percent(stats.in_time_fraction)} within the SLO"
        answered = f"; {stats.answered:,} answered{share}"
        first = stats.first_token_p50_seconds, stats.first_token_p99_seconds, slo.time_to_first_token_seconds
        following = stats.next_token_p50_seconds, stats.next_token_p99_seconds, slo.time_per_output_token_seconds
        for metric, (p50, p99, target), suffix in (
            ("time to first token", first, answered),
            ("time between tokens", following, ""),
        ):
            slo_detail = "" if target is None else f", SLO {_milliseconds(target)}"
            holds = None if target is None or math.isnan(p99) else p99 <= target
            detail = f"median {_milliseconds(p50)}{slo_detail}{suffix}"
            yield SummaryItem(f"p99 {metric}, {label}", _milliseconds(p99), detail, holds)


def _stage_items(run: Run) -> Iterator[SummaryItem]:
    for stage in run.pipeline.spec.ordered_stages:
        times = run.results.stage_times(stage.name) if run.results else None
        if times is not None:
            median = f"{_milliseconds(times.queue_p50)} + {_milliseconds(times.service_p50)}"
            p99 = f"p99 {_milliseconds(times.queue_p99)} + {_milliseconds(times.service_p99)}"
            detail = f"queue + service time, median; {p99}; {times.mean_batch_size:.1f} rows per batch"
            yield SummaryItem(f"stage {stage.name}", median, detail)
        elif run.results and stage.name in run.results.idle_stages():
            yield SummaryItem(
                f"stage {stage.name}", "no rows", "no request reached it; send --samples that do", holds=False
            )


def _row_items(run: Run) -> Iterator[SummaryItem]:
    """Shares of rows of stages that several points answer, or should answer."""
    for stage in run.pipeline.spec.ordered_stages:
        spans = row_bins(run, stage.name)
        measured, expected = total_rows(spans), expected_rows(spans)
        if measured and have_several_points(expected, measured):
            rate, expected_rate = escalation_rate(measured), escalation_rate(expected)
            details = [f"expected {_percent(expected_rate)}", describe_shares(measured)]
            details.append(f"expected {describe_shares(expected)}")
            saved: Counter[str] = Counter()
            for span in spans:
                saved.update(span.saved_seconds)
            details += [
                f"{seconds:,.0f} replica-seconds less than {name} alone"
                for name, seconds in saved.items()
                if seconds >= 1.0
            ]
            yield SummaryItem(f"escalation rate, stage {stage.name}", _percent(rate), "; ".join(details))


def print_summary(run: Run, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, title=f"{run.title}", title_justify="left")
    for item in summary_items(run):
        table.add_row(item.label, item.value, item.detail)
    console.print(table)


COMPARISON_COLUMNS = (
    "run",
    "received",
    "within the SLO",
    "measured accuracy",
    "expected accuracy",
    "p50",
    "p99",
    "mean cores",
    "dropped",
    "failed",
)


def comparison_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a row of COMPARISON_COLUMNS for each run."""
    return [_comparison_row(run.title, run_stats(run)) for run in runs]


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    console.print(terminal_table(COMPARISON_COLUMNS, comparison_rows(runs)))


def _comparison_row(title: str, stats: RunStats) -> tuple[str, ...]:
    return (
        title,
        f"{stats.received:,}",
        _percent(stats.slo_fraction),
        _accuracy(stats.measured_accuracy),
        _accuracy(stats.expected_accuracy),
        _milliseconds(stats.p50_seconds),
        _milliseconds(stats.p99_seconds),
        f"{stats.mean_cores:.2f}",
        str(stats.outcomes.get("dropped", 0)),
        str(stats.outcomes.get("failed", 0)),
    )


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.2f} %"


def _accuracy(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _milliseconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{1000 * value:.0f} ms"
