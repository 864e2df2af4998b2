"""Queries of the chart's dashboards and alerts, and their evaluation by a Prometheus."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).parents[2] / "charts" / "trimtab"
_THRESHOLD = re.compile(r"\s(?:==|>|<)\s*[0-9.]+")
_ABSENT = re.compile(r"\babsent(?=\()")


@dataclass(frozen=True, slots=True)
class Expression:
    """One query, with the dashboard and panel or the alert that it belongs to."""

    where: str
    title: str
    query: str


def dashboard_expressions(folder: Path = CHART / "dashboards") -> Iterator[Expression]:
    """Yield each query of each panel, with Grafana's variables."""
    for path in sorted(folder.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield Expression(path.stem, f"{panel['title']}: {target['legendFormat']}", target["expr"])


def alert_expressions(path: Path = CHART / "alerts.yaml") -> Iterator[Expression]:
    """Yield the condition of each alert."""
    for group in yaml.safe_load(path.read_text())["groups"]:
        for rule in group["rules"]:
            yield Expression("alerts", rule["alert"], rule["expr"])


def without_threshold(query: str) -> str:
    """The series of an alert, which must exist also while it does not fire."""
    return _ABSENT.sub("", _THRESHOLD.sub("", query))


def filled_in(query: str, namespace: str, pipeline: str, window: str) -> str:
    """Replace Grafana's variables by values."""
    values = {"$namespace": namespace, "$pipeline": pipeline, "$__rate_interval": window}
    for variable, value in values.items():
        query = query.replace(variable, value)
    return query


def all_expressions(namespace: str = ".*", pipeline: str = ".*", window: str = "1m") -> list[Expression]:
    """Every query of the chart, ready to be evaluated."""
    watched = [Expression(e.where, e.title, without_threshold(e.query)) for e in alert_expressions()]
    return [
        Expression(e.where, e.title, filled_in(e.query, namespace, pipeline, window))
        for e in (*dashboard_expressions(), *watched)
    ]


def evaluate(prometheus: str, query: str) -> int:
    """Number of series that a query returns. Raises ValueError with Prometheus' error."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
            content = json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]) from None
    return len(content["data"]["result"])
