"""`Panel`: a Grafana panel, and queries shared by panels.

Queries return zero for events that did not occur, such as drops, so that an empty panel always indicates a problem.
"""

from dataclasses import dataclass

S = 'namespace=~"$namespace",pipeline=~"$pipeline"'
R = "$__rate_interval"
PIPELINE = "namespace, pipeline"
WIDTH = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with one query per legend. `kind` is Grafana's panel type."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = WIDTH


def zero(query: str, **labels: str) -> str:
    """A query that returns zero, with these labels, if there are no events."""
    nothing = "vector(0)"
    for label, value in labels.items():
        nothing = f'label_replace({nothing}, "{label}", "{value}", "", "")'
    return f"{query} or on() {nothing}"


def refusals(*selectors: str) -> str:
    """Refusals per second by status and reason that match any of these selectors, else zero."""
    rates = [f"sum by (code, reason) (rate(trimtab_refusals_total{{{S},{selector}}}[{R}]))" for selector in selectors]
    return zero(" or ".join(rates), code="no code", reason="none")


def quantile(share: float, metric: str, by: str = "", of: str = S) -> str:
    grouping = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({grouping}) (rate({metric}_bucket{{{of}}}[{R}])))"


def mean(metric: str, by: str = "", of: str = S) -> str:
    return f"sum by ({by}) (rate({metric}_sum{{{of}}}[{R}])) / sum by ({by}) (rate({metric}_count{{{of}}}[{R}]))"
