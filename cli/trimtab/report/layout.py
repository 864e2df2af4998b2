"""The frame of every page: one HTML file that needs nothing else, no network, no other file."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from trimtab.report.summary import Card

Charts = dict[str, go.Figure]
ALONE = "alone"
"""As a chart's `meta`: its x axis is not the time that the page's other charts show."""


def page(title: str, body: str, drawn: Charts) -> str:
    """A page as HTML; `drawn` are the charts its sections made."""
    data = {name: json.loads(plotly.io.to_json(chart)) for name, chart in drawn.items()}
    for chart in data.values():
        chart["layout"].pop("template", None)
    here = files("trimtab.report")
    written = json.dumps(data).replace("</", "<\\/")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{(here / 'page.css').read_text()}</style></head>"
        f"<body><main>{body}</main>"
        f"<script type='application/json' id='charts'>{written}</script>"
        f"<script>{get_plotlyjs()}</script><script>{(here / 'page.js').read_text()}</script></body></html>\n"
    )


def section(title: str, note: str, chart: go.Figure | None, drawn: Charts) -> str:
    """A titled box, with a chart where there is one; the chart is added to `drawn`."""
    box = ""
    if chart is not None:
        name = f"chart-{len(drawn)}"
        drawn[name] = chart
        box = f"<div id='{name}' style='height:{int(chart.layout.height)}px'></div>"
    return f"<section><h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>{box}</section>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: range) -> str:
    """A table; the columns of `numbers` are aligned to the right."""
    kind = ["number" if n in numbers else "text" for n in range(len(heads))]
    head = "".join(f"<th class='{k}'>{escape(h)}</th>" for k, h in zip(kind, heads, strict=True))
    lines = ("".join(f"<td class='{k}'>{escape(c)}</td>" for k, c in zip(kind, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def card_row(shown: Iterable[Card]) -> str:
    """Figures to see at a glance, side by side."""
    return f"<div class='cards'>{''.join(map(_card, shown))}</div>"


def _card(card: Card) -> str:
    mark = {None: "", True: "<span class='yes'>✓</span> ", False: "<span class='no'>✗</span> "}[card.holds]
    inner = f"<div class='label'>{escape(card.label)}</div><div class='value'>{mark}{escape(card.value)}</div>"
    return f"<div class='card'>{inner}<div class='detail'>{escape(card.detail)}</div></div>"
