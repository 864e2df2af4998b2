"""Report of a benchmark: figures, thresholds, tables, an HTML page, and the line of JSON that ends its output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from trimtab.options import console, terminal_table
from trimtab.report import html_page
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.result_line import Direction, ResultLine, Threshold, threshold

Figure = float | int | str | None


class Page:
    """HTML page without dependencies, written top to bottom; `how` says what was run, such as "simulated"."""

    def __init__(self, title: str, how: str, lead: str) -> None:
        self._title = title
        self._charts: Charts = {}
        self._parts = [f"<h1>{escape(title)}, {escape(how)}</h1><p class='lead'>{escape(lead)}</p>"]

    def add_thresholds(self, report: "Report") -> None:
        """Add a card for each threshold."""
        cards = [SummaryItem(bar.bar, f"{bar.value:.4g}", bar.bound, bar.holds) for bar in report.bars]
        self._parts.append(html_page.summary_grid(cards))

    def add_chart(self, title: str, note: str, figure: go.Figure) -> None:
        self._parts.append(html_page.section(title, note, figure, self._charts))

    def add_table(
        self, title: str, note: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: range
    ) -> None:
        """Add a table whose columns `numbers` are aligned to the right."""
        self.add_notes(title, note, html=html_page.table(columns, rows, numbers))

    def add_notes(self, title: str, *notes: str, html: str = "") -> None:
        text = "".join(f"<p class='note'>{escape(note)}</p>" for note in notes)
        self._parts.append(f"<section><h2>{escape(title)}</h2>{text}{html}</section>")

    def render(self) -> str:
        return html_page.page(f"{self._title} · Trimtab", self._parts, self._charts)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.render())
        console.print(f"page: {path}")


@dataclass(slots=True)
class Report:
    """Figures and thresholds of the benchmark `name`, collected while it runs."""

    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    bars: list[Threshold] = field(default_factory=list)

    def add(self, figures: Mapping[str, Figure]) -> None:
        self.figures.update(figures)

    def hold(self, name: str, value: float, direction: Direction, bound: float) -> None:
        """Compare a value with its threshold."""
        self.bars.append(threshold(name, value, direction, bound))

    @property
    def holds(self) -> bool:
        """Whether every threshold holds."""
        return all(bar.holds for bar in self.bars)

    def finish(self) -> int:
        """Print each threshold, then all as one line of JSON; the exit code is 0 if all hold, else 1."""
        for bar in self.bars:
            console.print(f"{'holds' if bar.holds else 'MISSED'}: {bar.bar} {bar.value:.4g} {bar.bound}")
        ResultLine(name=self.name, figures=self.figures, bars=tuple(self.bars)).print()
        return 0 if self.holds else 1


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    console.print(terminal_table(columns, rows, title))
