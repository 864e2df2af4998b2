"""The evaluation as a table and as one HTML page that needs nothing else; what was served beside what was simulated."""

from html import escape

from benchmarks.otas import charts
from benchmarks.otas.beside import HEADS as SERVED_HEADS
from benchmarks.otas.beside import Beside
from benchmarks.otas.cells import BURSTY, SYNTHETIC
from benchmarks.otas.evaluation import Evaluation
from benchmarks.otas.methods import INFAAS, METHODS, OTAS, OURS, PETS, PETS_EVICTS, TOME, VPT
from benchmarks.otas.paper import ASSUMED
from trimtab.report import html_page
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem

MOST = "of the most that any policy could have"
HEADS = ("load", "method", "utility", "ours beside it", MOST, "type 1", "type 2", "type 3", "type 4", "paper")
SHOWN = (OURS, OTAS, PETS, PETS_EVICTS, INFAAS, TOME, VPT)
POINTS = ("g-20", "g-15", "g-10", "g-5", "g0", "g2", "g4", "g8")
PRINTED = {
    (SYNTHETIC, OTAS): "type 1 85.54 %, nobody late or evicted",
    (SYNTHETIC, PETS): "OTAS 18.2 % above",
    (SYNTHETIC, INFAAS): "OTAS 72.5 % above",
    (BURSTY, OTAS): "type 1 75.58 % (MAF)",
    (BURSTY, VPT): "type 1 64.14 % (MAF)",
    (BURSTY, TOME): "type 2 16.85 % (MAF)",
}


def result_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Rows of the table: one a load and method, at the paper's load."""
    rows: list[tuple[str, ...]] = []
    for workload in evaluation.workloads:
        for method, made in METHODS.items():
            types = [evaluation.type_share(workload, method, place) for place in range(4)]
            rows.append(
                (
                    workload,
                    method,
                    f"{evaluation.mean(workload, method, lambda one: one.utility):.0f}",
                    f"{100 * evaluation.gain(workload, method):+.1f} %" if method != OURS else "",
                    f"{100 * evaluation.of_ceiling(workload, method):.1f} %" if made.is_the_papers else "",
                    *(f"{100 * share:.2f} %" for share in types),
                    PRINTED.get((workload, method), ""),
                )
            )
    return rows


def render(evaluation: Evaluation, served: Beside | None = None) -> str:
    """The page, with what was served where something was."""
    drawn: Charts = {}
    lead = f"{len(evaluation.measured)} simulations · bursty load: {evaluation.trace}"
    ways = "simulated" if served is None else "simulated and served"
    body = [f"<h1>OTAS's evaluation, {ways}</h1><p class='lead'>{escape(lead)}</p>"]
    body.append(html_page.summary_grid(_cards(evaluation)))
    body.append(
        html_page.section(
            "What became of the queries",
            "The paper's figure 13, at the paper's load: right in time (1), wrong in time (2), late (3), evicted (4). "
            "The paper prints for OTAS 85.54 % right on its synthetic load, 75.58 % on its trace.",
            charts.types(evaluation, SHOWN),
            drawn,
        )
    )
    body.append(
        html_page.section(
            "Utility by load",
            "The paper's figures 9 and 10: utility in % of OTAS as printed; 1 is the paper's load.",
            charts.by_load(evaluation, SHOWN),
            drawn,
        )
    )
    body += [
        html_page.section(
            f"Tokens over time, {workload}",
            "The paper's figure 12, over time: which share was answered at each number of tokens; line: load.",
            charts.over_time(evaluation, workload, POINTS),
            drawn,
        )
        for workload in evaluation.workloads
    ]
    body.append(
        html_page.section(
            "Accuracy of answers",
            "The paper's figure 11: how many of the answers in time were expected to be no more accurate.",
            charts.accuracies(evaluation, SHOWN),
            drawn,
        )
    )
    table = html_page.table(HEADS, result_rows(evaluation), numbers=range(2, 9))
    body.append(f"<section><h2>All figures</h2><p class='note'>{escape(_CEILING)}</p>{table}</section>")
    if served is not None:
        body += _served(served, drawn)
    note = escape(
        f"Printed by the paper and used as it is: throughputs at 0 and −15, both tables, the load. {_ASSUMED}"
    )
    body.append(f"<section><h2>What is the paper's, and what is assumed</h2><p class='note'>{note}</p></section>")
    return html_page.page("OTAS's evaluation · Trimtab", body, drawn)


def _served(found: Beside, drawn: Charts) -> list[str]:
    """What a real transformer did on this machine."""
    table = html_page.table(SERVED_HEADS, found.rows(), numbers=range(2, len(SERVED_HEADS)))
    return [
        html_page.section(
            "Served: what became of the queries",
            f"vit-tasks' finer transformer, whose plain point serves {found.capacity_rps:.0f} queries a second here, "
            f"so the paper's loads times {found.scale:.3f}. The same four types; labels say what is right.",
            charts.types(found.evaluation, found.methods),
            drawn,
        ),
        html_page.section(
            "Served beside simulated",
            "Utility by labels, by the accuracy that answers promised, and by the simulator, which had the same "
            "arrivals and this machine's profile.",
            charts.beside(found),
            drawn,
        ),
        *(
            html_page.section(
                f"Served: points over time, {workload}",
                "Which share was answered at each operating point; line: load.",
                charts.over_time(found.evaluation, workload, found.points),
                drawn,
            )
            for workload in found.evaluation.workloads
        ),
        f"<section><h2>Served: all figures</h2><p class='note'>{escape(_SERVED)}</p>{table}</section>",
    ]


_SERVED = (
    "Each method was asked the same queries, one method after the other: what else the machine did meanwhile shows "
    "beside what is simulated. INFaaS's models are points of one transformer, loaded already; fixed prompts are "
    "those of a point that merges too. PetS drops nobody."
)
_CEILING = (
    "The most that any policy could have: a linear program's optimum on the same arrivals, in which batches may be "
    "parted, a query costs what it costs in the best batch, and all that comes is known beforehand. It is told of "
    "methods that choose among the paper's numbers of tokens alone: it bounds no other models, and nothing assumed."
)
_ASSUMED = (
    f"Assumed: {ASSUMED}. PetS knows no deadlines and drops nobody; beside it one that does. Second looks are not in "
    "the paper: the least certain share p is assumed to hold 1 − (1 − p)² of a gain. Nothing of that is judged."
)


def _cards(evaluation: Evaluation) -> list[SummaryItem]:
    gains = [
        (name, evaluation.gain(SYNTHETIC, name), evaluation.most_gain(SYNTHETIC, name))
        for name in (OTAS, PETS, PETS_EVICTS, INFAAS, TOME, VPT)
    ]
    right = evaluation.type_share(SYNTHETIC, OURS, 0)
    return [
        SummaryItem("right in time, synthetic", f"{100 * right:.1f} %", "the paper: 85.54 %", right >= 0.85),
        *(
            SummaryItem(
                f"utility over {name}", f"{100 * gain:+.1f} %", f"synthetic load; {100 * most:+.1f} % at most", gain > 0
            )
            for name, gain, most in gains
        ),
    ]
