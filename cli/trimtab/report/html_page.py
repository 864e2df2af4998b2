"""HTML page of a report: a single file without dependencies, or served live and refreshed by itself."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Literal

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from trimtab.report.summary import SummaryItem

Charts = dict[str, go.Figure]
OWN_X_AXIS = "own-x-axis"
"""`meta` of a chart whose x axis is not the time axis that the page's other charts share."""


def page(title: str, parts: Sequence[str], charts: Charts, state: Literal["live", "finished"] | None = None) -> str:
    """Render a page of HTML parts and the charts in them, by the id of their element.

    A page with a `state` is served: it loads plotly.js from the server, and a live one refreshes itself.
    """
    charts_json = json.dumps(_charts_json(charts)).replace("</", "<\\/")
    body = "".join(f"<div class='part'>{part}</div>" for part in parts)
    plotly_script = "<script src='plotly.js'></script>" if state else f"<script>{get_plotlyjs()}</script>"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_resource('page.css')}</style></head>"
        f"<body data-state='{state or 'static'}'><main id='parts'>{body}</main>"
        f"<script type='application/json' id='charts'>{charts_json}</script>"
        f"{plotly_script}<script>{_resource('page.js')}</script></body></html>\n"
    )


def _charts_json(charts: Charts) -> dict[str, object]:
    figures = {name: json.loads(plotly.io.to_json(chart)) for name, chart in charts.items()}
    for figure in figures.values():
        figure["layout"].pop("template", None)
    return figures


def _resource(name: str) -> str:
    return (files("trimtab.report") / name).read_text()


def section(title: str, note: str, chart: go.Figure | None, charts: Charts) -> str:
    """Render a titled box with an optional chart, which is added to `charts`."""
    box = ""
    if chart is not None:
        name = f"chart-{re.sub('[^a-z0-9]+', '-', title.lower())}"  # stable while a live page is refreshed
        charts[name] = chart
        box = f"<div id='{name}' style='height:{int(chart.layout.height)}px'></div>"
    return f"<section><h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>{box}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: range) -> str:
    """Render a table; the columns of `numbers` are aligned to the right."""
    classes = ["number" if n in numbers else "text" for n in range(len(columns))]
    head = "".join(f"<th class='{k}'>{escape(column)}</th>" for k, column in zip(classes, columns, strict=True))
    lines = (
        "".join(f"<td class='{k}'>{escape(cell)}</td>" for k, cell in zip(classes, row, strict=True)) for row in rows
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def summary_grid(items: Iterable[SummaryItem]) -> str:
    return f"<div class='cards'>{''.join(map(_card, items))}</div>"


def _card(item: SummaryItem) -> str:
    mark = {None: "", True: "<span class='yes'>✓</span> ", False: "<span class='no'>✗</span> "}[item.holds]
    inner = f"<div class='label'>{escape(item.label)}</div><div class='value'>{mark}{escape(item.value)}</div>"
    return f"<div class='card'>{inner}<div class='detail'>{escape(item.detail)}</div></div>"
