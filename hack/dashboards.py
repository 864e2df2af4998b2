"""Renders the chart's Grafana dashboards: each panel is one line of a table below, so that a review reads the queries.

`python hack/dashboards.py DIR` writes them; with `--check` it only compares and fails where one differs. What is
legitimately absent (no request was dropped, say) reads as zero, so that an empty panel always means something is wrong.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from trimtab_pipelines.generated import write_or_check
from trimtab_router.edge.refused import REASONS
from trimtab_router.refusal import CALLERS, CLIENT_BOUNDS

S = 'namespace=~"$namespace",pipeline=~"$pipeline"'
R = "$__rate_interval"
PIPELINE = "namespace, pipeline"
CODES = "|".join(sorted(code.name for code in CALLERS))
BOUNDS = "|".join(sorted(CLIENT_BOUNDS))
DOOR = "|".join(sorted(REASONS))
_WIDTH, _HEIGHT, _ACROSS = 8, 7, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a query for each legend. `kind` is Grafana's name of the type."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = _WIDTH


def zero(query: str, **labels: str) -> str:
    """Return a query that is zero, with these labels, where nothing of the kind has happened."""
    nothing = "vector(0)"
    for label, value in labels.items():
        nothing = f'label_replace({nothing}, "{label}", "{value}", "", "")'
    return f"{query} or on() {nothing}"


def refusals(*selections: str) -> str:
    """Return refusals a second by status and reason: those of any of these selections, else none."""
    rates = [f"sum by (code, reason) (rate(trimtab_refusals_total{{{S},{one}}}[{R}]))" for one in selections]
    return zero(" or ".join(rates), code="no code", reason="none")


def quantile(share: float, metric: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    kept = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({kept}) (rate({metric}_bucket{{{S}}}[{R}])))"


def mean(metric: str, by: str = "") -> str:
    """Return the mean of what a summary or histogram observed."""
    return f"sum by ({by}) (rate({metric}_sum{{{S}}}[{R}])) / sum by ({by}) (rate({metric}_count{{{S}}}[{R}]))"


OVERVIEW = (
    Panel(
        "Pipelines ready",
        "Pipelines whose condition Ready is True, and all there are.",
        "short",
        {
            "ready": f'sum(trimtab_condition{{{S},type="Ready",status="True"}})',
            "all": f'count(trimtab_condition{{{S},type="Ready",status="True"}})',
        },
        "stat",
    ),
    Panel(
        "Requests not answered well",
        "Share of requests that were late, dropped, refused or failed, callers' own faults left out.",
        "percentunit",
        {
            "not well": f'1 - sum(rate(trimtab_requests_total{{{S},outcome="ok"}}[{R}])) '
            f"/ (sum(rate(trimtab_requests_total{{{S}}}[{R}])) "
            f"- (sum(rate(trimtab_callers_faults_total{{{S}}}[{R}])) or vector(0)))"
        },
        "stat",
    ),
    Panel(
        "Cores given, budget",
        "Cores that all replicas together ask for, against the sum of the budgets.",
        "short",
        {
            "given": f"sum(trimtab_allocated_cores{{{S}}})",
            "budget": f"sum(trimtab_budget_cores{{{S}}})",
        },
        "stat",
    ),
    Panel(
        "Load and forecast",
        "Requests a second that arrive, and the peak each plan was made for.",
        "reqps",
        {
            "{{pipeline}} load": f"max by ({PIPELINE}) (trimtab_observed_load_rps{{{S}}})",
            "{{pipeline}} forecast": f"max by ({PIPELINE}) (trimtab_forecast_load_rps{{{S}}})",
        },
    ),
    Panel(
        "Forecast error",
        "Mean error of recent forecasts (SMAPE: 0 is exact, 2 is opposite).",
        "short",
        {
            "{{pipeline}}": zero(
                f"max by ({PIPELINE}) (trimtab_forecast_error_ratio{{{S}}})", pipeline="no forecast yet"
            )
        },
    ),
    Panel(
        "Requests by outcome",
        "All that arrived: answered in time, late, dropped, refused, failed.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_requests_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Latency, share of the promise",
        "99th percentile of answered requests over the promised latency; above 1 the promise is broken.",
        "percentunit",
        {
            "{{pipeline}}": f"{quantile(0.99, 'trimtab_request_latency_seconds', PIPELINE)} "
            f"/ on ({PIPELINE}) max by ({PIPELINE}) (trimtab_slo_seconds{{{S}}})"
        },
    ),
    Panel(
        "Accuracy expected and served",
        "What the plan in force promises, and the mean of what answered.",
        "percentunit",
        {
            "{{pipeline}} expected": f"max by ({PIPELINE}) (trimtab_planned_accuracy{{{S}}})",
            "{{pipeline}} served": mean("trimtab_served_accuracy", PIPELINE),
        },
    ),
    Panel(
        "Cores against budget",
        "Cores the replicas ask for, by pipeline, over the pipeline's budget.",
        "percentunit",
        {
            "{{pipeline}}": f"max by ({PIPELINE}) (trimtab_allocated_cores{{{S}}}) "
            f"/ on ({PIPELINE}) max by ({PIPELINE}) (trimtab_budget_cores{{{S}}})"
        },
    ),
    Panel(
        "Conditions",
        "1 where a condition is True.",
        "short",
        {"{{pipeline}} {{type}}": f'max by ({PIPELINE}, type) (trimtab_condition{{{S},status="True"}})'},
        "state-timeline",
        12,
    ),
    Panel(
        "Plans that keep every constraint",
        "0: the least bad plan runs, because nothing within the budget carries the load in time.",
        "short",
        {"{{pipeline}}": f"min by ({PIPELINE}) (trimtab_plan_feasible{{{S}}})"},
        "state-timeline",
        12,
    ),
    Panel(
        "Decisions",
        "Decisions a minute: changed, kept as it was, or held back because the gain was too small.",
        "cpm",
        {"{{outcome}}": f"60 * sum by (outcome) (rate(trimtab_decisions_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Solver time",
        "Time to decide, median and 99th percentile.",
        "s",
        {
            "p50": quantile(0.5, "trimtab_solve_seconds"),
            "p99": quantile(0.99, "trimtab_solve_seconds"),
        },
    ),
    Panel(
        "Reconciliations",
        "Passes of the operator a second, by outcome.",
        "ops",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_reconciles_total[{R}]))"},
    ),
    Panel(
        "Reconciliation time",
        "99th percentile of one pass of the operator.",
        "s",
        {"p99": f"histogram_quantile(0.99, sum by (le) (rate(trimtab_reconcile_seconds_bucket[{R}])))"},
    ),
    Panel(
        "Writes to the API server",
        "What the operator applied or deleted, by kind. With nothing to do it writes nothing.",
        "wps",
        {"{{kind}}": zero(f"sum by (kind) (rate(trimtab_api_writes_total[{R}]))", kind="none")},
    ),
    Panel(
        "Time since the last change",
        "Since the adapter last changed a pipeline's plan.",
        "s",
        {"{{pipeline}}": f"time() - max by ({PIPELINE}) (trimtab_plan_changed_timestamp_seconds{{{S}}})"},
    ),
    Panel(
        "Not answered well: callers' own doing",
        "Requests that their callers' own doing kept from an answer: refused, or left before the promise was due.",
        "reqps",
        {"{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_callers_faults_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Not answered well: ours",
        "Late, dropped, refused and failed requests without those of callers' own doing; what the alerts watch.",
        "reqps",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S}}}[{R}])) "
            f'- sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S},outcome="ok"}}[{R}])) '
            f"- sum by ({PIPELINE}) (rate(trimtab_callers_faults_total{{{S}}}[{R}]))"
        },
    ),
    Panel(
        "Requests under way, share of the window",
        "Near 1 the routers turn requests away, because more under way could not be answered in time.",
        "percentunit",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (trimtab_requests_under_way{{{S}}}) "
            f"/ sum by ({PIPELINE}) (trimtab_window_requests{{{S}}})"
        },
    ),
)

ONE_PIPELINE = (
    Panel(
        "Load and forecast",
        "Requests a second that arrive, as counted and as their peak, and the peak the plan was made for.",
        "reqps",
        {
            "arrivals": f"sum(rate(trimtab_requests_received_total{{{S}}}[{R}]))",
            "peak": f"max(trimtab_observed_load_rps{{{S}}})",
            "forecast by {{source}}": f"max by (source) (trimtab_forecast_load_rps{{{S}}})",
        },
    ),
    Panel(
        "Forecast error",
        "Mean error of recent forecasts (SMAPE: 0 is exact, 2 is opposite).",
        "short",
        {"error": zero(f"max(trimtab_forecast_error_ratio{{{S}}})")},
    ),
    Panel(
        "Requests by outcome",
        "They add up to all that arrived.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_requests_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Plan: replicas by stage and variant",
        "What the plan asks for. A change of variant shows as one line ending and another beginning.",
        "short",
        {"{{stage}} {{variant}}": f"max by (stage, variant) (trimtab_planned_replicas{{{S}}})"},
    ),
    Panel(
        "Replicas: wanted and ready",
        "What the operator asks of the cluster, and what is ready; a gap that stays is a condition's business.",
        "short",
        {"{{stage}} {{state}}": f"sum by (stage, state) (trimtab_replicas{{{S}}})"},
    ),
    Panel(
        "Replicas the router sees",
        "Replicas that may be given a batch now.",
        "short",
        {"{{stage}}": f"min by (stage) (trimtab_ready_replicas{{{S}}})"},
    ),
    Panel(
        "Accuracy expected and served",
        "What the plan promises, and the mean of what answered.",
        "percentunit",
        {
            "expected": f"max(trimtab_planned_accuracy{{{S}}})",
            "served": mean("trimtab_served_accuracy"),
        },
    ),
    Panel(
        "Latency against the promise",
        "Percentiles of answered requests, the latency planned for, and the promise.",
        "s",
        {
            "p50": quantile(0.5, "trimtab_request_latency_seconds"),
            "p99": quantile(0.99, "trimtab_request_latency_seconds"),
            "planned": f"max(trimtab_planned_latency_seconds{{{S}}})",
            "promise": f"max(trimtab_slo_seconds{{{S}}})",
        },
    ),
    Panel(
        "Drops by reason",
        "Requests dropped early because they could not make their deadline, by stage and reason.",
        "reqps",
        {
            "{{stage}} {{reason}}": zero(
                f"sum by (stage, reason) (rate(trimtab_drops_total{{{S}}}[{R}]))", stage="no stage", reason="none"
            )
        },
    ),
    Panel(
        "Refusals and failures of ours",
        "Requests refused for want of room or of a replica, or failed; they break the promise and set off alerts.",
        "reqps",
        {"{{code}} {{reason}}": refusals(f'code!~"{CODES}",reason!~"{BOUNDS}"')},
        width=6,
    ),
    Panel(
        "Refusals by callers' own doing",
        "Malformed, too large, too slow, without a key, more than one client's share; they page nobody.",
        "reqps",
        {"{{code}} {{reason}}": refusals(f'code=~"{CODES}"', f'reason=~"{BOUNDS}"')},
        width=6,
    ),
    Panel(
        "Refused at the door",
        "By reasons that the door gives; Overload and PayloadTooLarge are the router's too.",
        "reqps",
        {
            "{{reason}}": zero(
                f'sum by (reason) (rate(trimtab_refusals_total{{{S},reason=~"{DOOR}"}}[{R}]))', reason="none"
            )
        },
        width=6,
    ),
    Panel(
        "Requests under way against the window",
        "Let in and not answered yet, and how many may be; who comes while it is full is refused with Overload.",
        "short",
        {
            "under way": f"sum(trimtab_requests_under_way{{{S}}})",
            "window": f"sum(trimtab_window_requests{{{S}}})",
        },
        width=6,
    ),
    Panel(
        "Queue",
        "Rows that wait, by stage.",
        "short",
        {"{{stage}}": f"sum by (stage) (trimtab_queue_length_rows{{{S}}})"},
    ),
    Panel(
        "Time in the queue",
        "99th percentile from joining a stage's queue to leaving in a batch.",
        "s",
        {"{{stage}}": quantile(0.99, "trimtab_stage_queue_seconds", "stage")},
    ),
    Panel(
        "Batch fill",
        "Mean rows of a batch over the batch size planned; low with a long queue means replicas are the bottleneck.",
        "percentunit",
        {
            "{{stage}}": f"{mean('trimtab_batch_size_rows', 'stage')} "
            f"/ on (stage) max by (stage) (trimtab_planned_batch_size_rows{{{S}}})"
        },
    ),
    Panel(
        "Service time",
        "99th percentile from a batch's departure to its answer.",
        "s",
        {"{{stage}} {{variant}}": quantile(0.99, "trimtab_stage_service_seconds", "stage, variant")},
    ),
    Panel(
        "Service time against the profile",
        "Observed over profiled; well above 1 the nodes are slower than what was measured: profile anew.",
        "short",
        {"{{stage}} {{variant}}": f"max by (stage, variant) (trimtab_service_ratio{{{S}}})"},
    ),
    Panel(
        "Cores against budget",
        "Cores the replicas ask for, cores the plan asks for, and the budget.",
        "short",
        {
            "given": f"max(trimtab_allocated_cores{{{S}}})",
            "planned": f"max(trimtab_planned_cores{{{S}}})",
            "budget": f"max(trimtab_budget_cores{{{S}}})",
        },
    ),
    Panel(
        "Solver time",
        "Time to decide, 99th percentile.",
        "s",
        {"p99": quantile(0.99, "trimtab_solve_seconds")},
    ),
    Panel(
        "Plan decided and plan in force",
        "Generations; the router follows what the adapter decides within milliseconds.",
        "short",
        {
            "decided": f"max(trimtab_planned_generation{{{S}}})",
            "in force": f"min(trimtab_plan_generation{{{S}}})",
        },
    ),
    Panel(
        "Why the last plan changed",
        "What changed against the plan before, and why.",
        "short",
        {"{{change}}": f"max by (change) (trimtab_last_change_info{{{S}}})"},
        "table",
        12,
    ),
    Panel(
        "Conditions",
        "1 where a condition is True.",
        "short",
        {"{{type}}": f'max by (type) (trimtab_condition{{{S},status="True"}})'},
        "state-timeline",
        12,
    ),
    Panel(
        "Retries",
        "Slices of batches sent to another replica, by reason.",
        "ops",
        {
            "{{stage}} {{reason}}": zero(
                f"sum by (stage, reason) (rate(trimtab_retries_total{{{S}}}[{R}]))", stage="no stage", reason="none"
            )
        },
    ),
)


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], *, several: bool) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
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
    seen = "trimtab_requests_received_total"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "namespace", "label": "Namespace", **choice, "query": f"label_values({seen}, namespace)"},
        {
            "name": "pipeline",
            "label": "Pipeline",
            **choice,
            "query": f'label_values({seen}{{namespace=~"$namespace"}}, pipeline)',
        },
    ]


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Fill rows from left to right."""
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
    """Map each file name to its text."""
    dashboards = {
        "overview": dashboard("trimtab-overview", "Trimtab / Overview", OVERVIEW, several=True),
        "pipeline": dashboard("trimtab-pipeline", "Trimtab / One pipeline", ONE_PIPELINE, several=False),
    }
    return {f"{name}.json": json.dumps(body, indent=1, ensure_ascii=False) + "\n" for name, body in dashboards.items()}


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], render(), ".json"))
