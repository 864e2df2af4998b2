"""The frame of every page: one HTML file that needs nothing else, no network, no other file."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from trimtab.report.summary import SummaryItem

Charts = dict[str, go.Figure]
OWN_X_AXIS = "alone"
"""As a chart's `meta`: its x axis is not the time that the page's other charts show."""


def page(title: str, parts: Sequence[str], drawn: Charts) -> str:
    """A page as HTML, of parts one below the other; `drawn` are the charts its sections made."""
    written = json.dumps(plain(drawn)).replace("</", "<\\/")
    body = "".join(f"<div class='part'>{part}</div>" for part in parts)
    return (
        f"{head(title)}<body><main id='parts'>{body}</main>"
        f"<script type='application/json' id='charts'>{written}</script>"
        f"<script>{get_plotlyjs()}</script><script>{_own('page.js')}</script></body></html>\n"
    )


def live_page(title: str) -> str:
    """A page as HTML that is empty at first, and asks who serves it for its parts again and again."""
    return (
        f"{head(title)}<body><p id='state'>asking…</p><main id='parts'></main>"
        "<script src='plotly.js'></script>"
        f"<script>{_own('page.js')}</script><script>{_own('live.js')}</script></body></html>\n"
    )


def plain(drawn: Charts) -> dict[str, Any]:
    """Charts as JSON has them."""
    data = {name: json.loads(plotly.io.to_json(chart)) for name, chart in drawn.items()}
    for chart in data.values():
        chart["layout"].pop("template", None)
    return data


def head(title: str) -> str:
    """What stands before a page's body."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_own('page.css')}</style></head>"
    )


def _own(name: str) -> str:
    return (files("trimtab.report") / name).read_text()


def section(title: str, note: str, chart: go.Figure | None, drawn: Charts) -> str:
    """A titled box, with a chart where there is one; the chart is added to `drawn`."""
    box = ""
    if chart is not None:
        name = f"chart-{re.sub('[^a-z0-9]+', '-', title.lower())}"  # the same while the page grows
        drawn[name] = chart
        box = f"<div id='{name}' style='height:{int(chart.layout.height)}px'></div>"
    return f"<section><h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>{box}</section>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: range) -> str:
    """A table; the columns of `numbers` are aligned to the right."""
    kind = ["number" if n in numbers else "text" for n in range(len(heads))]
    head = "".join(f"<th class='{k}'>{escape(h)}</th>" for k, h in zip(kind, heads, strict=True))
    lines = ("".join(f"<td class='{k}'>{escape(c)}</td>" for k, c in zip(kind, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def summary_grid(shown: Iterable[SummaryItem]) -> str:
    """Figures to see at a glance, side by side."""
    return f"<div class='cards'>{''.join(map(_card, shown))}</div>"


def _card(card: SummaryItem) -> str:
    mark = {None: "", True: "<span class='yes'>✓</span> ", False: "<span class='no'>✗</span> "}[card.holds]
    inner = f"<div class='label'>{escape(card.label)}</div><div class='value'>{mark}{escape(card.value)}</div>"
    return f"<div class='card'>{inner}<div class='detail'>{escape(card.detail)}</div></div>"
