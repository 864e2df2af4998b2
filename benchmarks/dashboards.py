"""Do the chart's dashboards and alerts show anything? Runs every expression against a live Prometheus.

`python -m benchmarks.dashboards --prometheus URL [--namespace NS] [--pipeline NAME]`. An alert is quiet when all is
well, so it is asked without its threshold: what it watches must be there. The last line is the outcome as JSON.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from trimtab_pipelines.result_line import ResultLine, threshold

CHART = Path(__file__).parents[1] / "charts" / "trimtab"
_THRESHOLD = re.compile(r"\s(?:==|>|<)\s*[0-9.]+")
_ABSENT = re.compile(r"\babsent(?=\()")


@dataclass(frozen=True, slots=True)
class Expression:
    """One query, and where it stands."""

    where: str
    title: str
    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    """How many series a query returned, or why it could not be run."""

    expression: Expression
    series: int
    error: str = ""


def dashboard_expressions(folder: Path = CHART / "dashboards") -> Iterator[Expression]:
    """Yield each query of each panel, with Grafana's variables still in it."""
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
    """What an alert watches, whether or not it would fire."""
    return _ABSENT.sub("", _THRESHOLD.sub("", query))


def filled_in(query: str, namespace: str, pipeline: str, window: str) -> str:
    """Put values in place of Grafana's variables."""
    values = {"$namespace": namespace, "$pipeline": pipeline, "$__rate_interval": window}
    for variable, value in values.items():
        query = query.replace(variable, value)
    return query


def everything(namespace: str = ".*", pipeline: str = ".*", window: str = "1m") -> list[Expression]:
    """Every query of the chart, ready to be run."""
    watched = [Expression(one.where, one.title, without_threshold(one.query)) for one in alert_expressions()]
    return [
        Expression(one.where, one.title, filled_in(one.query, namespace, pipeline, window))
        for one in (*dashboard_expressions(), *watched)
    ]


def ask(client: httpx.Client, expression: Expression) -> Answer:
    """Run one query."""
    response = client.get("/api/v1/query", params={"query": expression.query})
    content = response.json()
    if content["status"] != "success":
        return Answer(expression, 0, content["error"])
    return Answer(expression, len(content["data"]["result"]))


def main(arguments: list[str] | None = None) -> int:
    """Ask, print what came back; 1 where an expression returned nothing."""
    parser = argparse.ArgumentParser("benchmarks.dashboards", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prometheus", required=True, help="such as http://127.0.0.1:9090")
    parser.add_argument("--namespace", default=".*")
    parser.add_argument("--pipeline", default=".*")
    parser.add_argument("--window", default="1m", help="window of rates; a few scrape intervals")
    options = parser.parse_args(arguments)
    expressions = everything(options.namespace, options.pipeline, options.window)
    with httpx.Client(base_url=options.prometheus, timeout=30) as client:
        answers = [ask(client, expression) for expression in expressions]
    Console(width=160).print(_table(answers))
    outcome = outcome_of(answers)
    outcome.print()
    return 0 if outcome.holds else 1


def outcome_of(answers: list[Answer]) -> ResultLine:
    """Count what returned data, by dashboard and in all."""
    places = dict.fromkeys(answer.expression.where for answer in answers)
    figures = {
        f"{place}_{what}": sum(1 for answer in answers if answer.expression.where == place and (answer.series or all_))
        for place in places
        for what, all_ in (("with_data", False), ("expressions", True))
    }
    empty = sum(1 for answer in answers if not answer.series)
    figures |= {"expressions": len(answers), "with_data": len(answers) - empty}
    return ResultLine(name="dashboards", figures=figures, bars=(threshold("expressions_without_data", empty, "==", 0),))


def _table(answers: list[Answer]) -> Table:
    table = Table("where", "expression", "series", "error")
    for answer in answers:
        series = str(answer.series) if answer.series else "[red]none[/red]"
        table.add_row(answer.expression.where, answer.expression.title, series, answer.error)
    return table


if __name__ == "__main__":
    sys.exit(main())
