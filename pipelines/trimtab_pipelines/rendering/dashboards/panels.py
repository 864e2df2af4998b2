"""A panel of a dashboard, and the queries that many share. Pure.

What is legitimately absent (no request was dropped, say) reads as zero, so that an empty panel always means that
something is wrong.
"""

from dataclasses import dataclass

S = 'namespace=~"$namespace",pipeline=~"$pipeline"'
R = "$__rate_interval"
PIPELINE = "namespace, pipeline"
WIDTH = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a query for each legend. `kind` is Grafana's name of the type."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = WIDTH


def zero(query: str, **labels: str) -> str:
    """A query that is zero, with these labels, where nothing of the kind has happened."""
    nothing = "vector(0)"
    for label, value in labels.items():
        nothing = f'label_replace({nothing}, "{label}", "{value}", "", "")'
    return f"{query} or on() {nothing}"


def refusals(*selections: str) -> str:
    """Refusals a second by status and reason: those of any of these selections, else none."""
    rates = [f"sum by (code, reason) (rate(trimtab_refusals_total{{{S},{one}}}[{R}]))" for one in selections]
    return zero(" or ".join(rates), code="no code", reason="none")


def quantile(share: float, metric: str, by: str = "", of: str = S) -> str:
    """A quantile of a histogram, of the series that a selection takes."""
    kept = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({kept}) (rate({metric}_bucket{{{of}}}[{R}])))"


def mean(metric: str, by: str = "", of: str = S) -> str:
    """The mean of what a summary or histogram observed, of the series that a selection takes."""
    return f"sum by ({by}) (rate({metric}_sum{{{of}}}[{R}])) / sum by ({by}) (rate({metric}_count{{{of}}}[{R}]))"
