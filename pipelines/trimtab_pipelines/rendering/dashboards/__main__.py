"""Renderer of the chart's Grafana dashboards from tables of panels.

`python -m trimtab_pipelines.rendering.dashboards DIR` writes them; with `--check` it compares them and fails if one
differs.
"""

import json
import sys
from typing import Any

from trimtab_pipelines.rendering.dashboards.chats import CHATS
from trimtab_pipelines.rendering.dashboards.overview import OVERVIEW
from trimtab_pipelines.rendering.dashboards.panels import Panel
from trimtab_pipelines.rendering.dashboards.requests import REQUESTS
from trimtab_pipelines.rendering.dashboards.stages import STAGES
from trimtab_pipelines.rendering.generated import write_or_check

_HEIGHT, _ACROSS = 7, 24


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], *, several: bool) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["trimtab"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(several=several)},
        "panels": _placed(panels),
    }


def _variables(*, several: bool) -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    choice = {"type": "query", "datasource": source, "refresh": 2, "sort": 1, "multi": several, "includeAll": several}
    if several:
        choice |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    metric = "trimtab_requests_received_total"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "namespace", "label": "Namespace", **choice, "query": f"label_values({metric}, namespace)"},
        {
            "name": "pipeline",
            "label": "Pipeline",
            **choice,
            "query": f'label_values({metric}{{namespace=~"$namespace"}}, pipeline)',
        },
    ]


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Place panels in rows from left to right."""
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > _ACROSS:
            x, y = 0, y + _HEIGHT
        placed.append(_panel(number, panel, x, y))
        x += panel.width
    return placed


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + n), "datasource": source, "expr": query, "legendFormat": legend}
        | ({"instant": True, "format": "table"} if panel.kind == "table" else {})
        for n, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def render() -> dict[str, str]:
    dashboards = {
        "overview": dashboard("trimtab-overview", "Trimtab / Overview", OVERVIEW, several=True),
        "pipeline": dashboard("trimtab-pipeline", "Trimtab / One pipeline", REQUESTS + STAGES, several=False),
        "chats": dashboard("trimtab-chats", "Trimtab / Chats", CHATS, several=False),
    }
    return {f"{name}.json": json.dumps(body, indent=1, ensure_ascii=False) + "\n" for name, body in dashboards.items()}


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], render(), ".json"))
