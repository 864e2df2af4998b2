"""Page section of digits-av served: the paper's plots, and the simulation of the same jobs."""

from collections.abc import Sequence
from html import escape

from benchmarks.mosel.beside import METHODS, MODEL, PLAIN, Beside, Pair
from benchmarks.mosel.plots import Panel, by_load, carried
from trimtab.report import html_page
from trimtab.report.html_page import Charts

HEADS = (
    "load",
    "policy",
    "jobs",
    "violations",
    "simulated",
    "both met",
    "simulated",
    "completion",
    "simulated",
    "expected",
    "measured (95 %)",
    "provisional",
)
SUM_HEADS = ("policy", "rows/s at ≤ 1 %", "beside all senses", "simulated", "beside all senses", "violations")
TABLE_NOTE = (
    "Violations: jobs without an answer in time. Both met: in time and, by expectation, as accurate as the job "
    "asked. Completion: mean seconds of what was answered. Expected: accuracy of rows, as answers tell it. Measured: "
    "rows named rightly. Provisional: jobs answered before a second look came."
)


def sections(beside: Beside, drawn: Charts) -> list[str]:
    """The parts of the page; their charts are added to `drawn`."""
    panels = [Panel("served", beside.served, MODEL), Panel("simulated", beside.simulated, MODEL)]
    return [
        f"<section><h2>digits-av, served</h2><p class='note'>{escape(_lead(beside))}</p></section>",
        html_page.section(
            "digits-av: violations by load",
            "Jobs without an answer in time, in %; at 1 the peak is twice what all senses carry.",
            by_load(panels, METHODS, lambda one: 100 * one.violations, "violations, %", alike=True),
            drawn,
        ),
        html_page.section(
            "digits-av: jobs that met both SLOs, by load",
            "In time, and expected to be as accurate as asked, in %.",
            by_load(panels, METHODS, lambda one: 100 * one.met, "both met, %", alike=True),
            drawn,
        ),
        html_page.section(
            "digits-av: completion time by load",
            "Mean seconds from when a job was due to its answer; what was dropped has none.",
            by_load(panels, METHODS, lambda one: one.mean_seconds, "seconds", alike=True),
            drawn,
        ),
        html_page.section(
            "digits-av: throughput with one violation in a hundred",
            "Rows a second answered in time, on average over the load's ups and downs; pale: simulated.",
            carried(panels, METHODS, "rows/s"),
            drawn,
        ),
        "<section><h2>digits-av: all figures</h2>"
        + html_page.table(SUM_HEADS, sum_rows(beside), numbers=range(1, len(SUM_HEADS)))
        + f"<p class='note'>{escape(TABLE_NOTE)}</p>"
        + html_page.table(HEADS, result_rows(beside), numbers=range(2, len(HEADS)))
        + "</section>",
    ]


def result_rows(beside: Beside) -> list[tuple[str, ...]]:
    """Rows of the table: one a load and policy."""
    return [_row(pair) for pair in beside.pairs]


def sum_rows(beside: Beside) -> list[tuple[str, ...]]:
    """What each policy carries, and what it violates over all loads."""
    rows = []
    for method in METHODS:
        cells: list[str] = []
        for evaluation in (beside.served, beside.simulated):
            own, plain = (evaluation.carried_rps(MODEL, name) for name in (method, PLAIN))
            cells += [f"{own:.0f}", f"{own / plain:.2f}" if plain > 0 else "–"]
        violations = beside.served.mean(MODEL, method, lambda one: one.violations)
        rows.append((method, *cells, f"{100 * violations:.1f} %"))
    return rows


def _row(pair: Pair) -> tuple[str, ...]:
    served, simulated = pair.served, pair.simulated
    right, low, high = pair.right
    return (
        f"{served.cell.factor:g}",
        served.cell.method,
        str(served.jobs),
        *_both([100 * one.violations for one in (served, simulated)], "{:.1f} %"),
        *_both([100 * one.met for one in (served, simulated)], "{:.1f} %"),
        *_both([one.mean_seconds for one in (served, simulated)], "{:.2f} s"),
        f"{pair.expected:.3f}",
        f"{right:.3f} ({low:.3f}–{high:.3f})",
        f"{100 * served.provisional:.1f} %",
    )


def _both(values: Sequence[float], form: str) -> list[str]:
    return [form.format(value) for value in values]


def _lead(beside: Beside) -> str:
    ratios = ", ".join(f"{ratio:.2f} at load {load:g}" for load, ratio in beside.ratios.items())
    cores = f"{beside.cores:g} of a core" if beside.is_held else "what it got of the machine's cores"
    lost = f" In {beside.lost} of these loads a router was lost and replaced." if beside.lost else ""
    return (
        f"Five policies, each with a replica of its own that has {cores}, were offered the same jobs in turns at every "
        f"load: {beside.items}, load: {beside.trace}. All senses carried {beside.carried_rps:.0f} rows a second here, "
        f"in batches that took {beside.speed:.2f} times what the profile says; plans stand on that. The simulator had "
        f"the same jobs, plans and profile. What batches take over what plans stand on, by size, it was told from "
        f"those of all senses at that load ({ratios}), and so what a job takes outside of them. It knows nothing of "
        f"other batches, nor of the time that router and callers lack for long on a busy machine.{lost}"
    )
