"""All pipelines on one dashboard. Pure."""

from trimtab_pipelines.rendering.dashboards.panels import PIPELINE, Panel, R, S, mean, quantile, zero

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
            f"- (sum(rate(trimtab_client_errors_total{{{S}}}[{R}])) or vector(0)))"
        },
        "stat",
    ),
    Panel(
        "Cores given, budget",
        "Cores that all replicas together ask for, against the sum of the budgets.",
        "short",
        {"given": f"sum(trimtab_allocated_cores{{{S}}})", "budget": f"sum(trimtab_budget_cores{{{S}}})"},
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
            "{{pipeline}} served": mean("trimtab_expected_accuracy", PIPELINE),
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
        {"p50": quantile(0.5, "trimtab_solve_seconds"), "p99": quantile(0.99, "trimtab_solve_seconds")},
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
        {"{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_client_errors_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Not answered well: ours",
        "Late, dropped, refused and failed requests without those of callers' own doing; what the alerts watch.",
        "reqps",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S}}}[{R}])) "
            f'- sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S},outcome="ok"}}[{R}])) '
            f"- sum by ({PIPELINE}) (rate(trimtab_client_errors_total{{{S}}}[{R}]))"
        },
    ),
    Panel(
        "Requests under way, share of the window",
        "Near 1 the routers turn requests away, because more under way could not be answered in time.",
        "percentunit",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (trimtab_requests_in_flight{{{S}}}) "
            f"/ sum by ({PIPELINE}) (trimtab_concurrency_limit{{{S}}})"
        },
    ),
)
