"""Overview dashboard of all pipelines."""

from trimtab_pipelines.rendering.dashboards.panels import PIPELINE, Panel, R, S, mean, quantile, zero

OVERVIEW = (
    Panel(
        "Pipelines ready",
        "Number of pipelines whose condition Ready is True, and of all pipelines.",
        "short",
        {
            "ready": f'sum(trimtab_condition{{{S},type="Ready",status="True"}})',
            "all": f'count(trimtab_condition{{{S},type="Ready",status="True"}})',
        },
        "stat",
    ),
    Panel(
        "Unsuccessful requests",
        "Share of requests that were late, dropped, refused or failed, without client errors.",
        "percentunit",
        {
            "unsuccessful": f'1 - sum(rate(trimtab_requests_total{{{S},outcome="ok"}}[{R}])) '
            f"/ (sum(rate(trimtab_requests_total{{{S}}}[{R}])) "
            f"- (sum(rate(trimtab_client_errors_total{{{S}}}[{R}])) or vector(0)))"
        },
        "stat",
    ),
    Panel(
        "Allocated cores and budget",
        "Cores requested by all replicas, and the sum of the budgets.",
        "short",
        {"allocated": f"sum(trimtab_allocated_cores{{{S}}})", "budget": f"sum(trimtab_budget_cores{{{S}}})"},
        "stat",
    ),
    Panel(
        "Load and forecast",
        "Arriving requests per second, and the forecast peak of each plan.",
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
        "Received requests by outcome: on time, late, dropped, refused or failed.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_requests_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Latency relative to the SLO",
        "99th percentile of latency over the SLO; above 1 the SLO is violated.",
        "percentunit",
        {
            "{{pipeline}}": f"{quantile(0.99, 'trimtab_request_latency_seconds', PIPELINE)} "
            f"/ on ({PIPELINE}) max by ({PIPELINE}) (trimtab_slo_seconds{{{S}}})"
        },
    ),
    Panel(
        "Planned and expected accuracy",
        "Accuracy of the applied plan, and mean expected accuracy of responses.",
        "percentunit",
        {
            "{{pipeline}} planned": f"max by ({PIPELINE}) (trimtab_planned_accuracy{{{S}}})",
            "{{pipeline}} expected": mean("trimtab_expected_accuracy", PIPELINE),
        },
    ),
    Panel(
        "Allocated cores relative to the budget",
        "Cores requested by a pipeline's replicas over its budget.",
        "percentunit",
        {
            "{{pipeline}}": f"max by ({PIPELINE}) (trimtab_allocated_cores{{{S}}}) "
            f"/ on ({PIPELINE}) max by ({PIPELINE}) (trimtab_budget_cores{{{S}}})"
        },
    ),
    Panel(
        "Conditions",
        "1 if the condition is True.",
        "short",
        {"{{pipeline}} {{type}}": f'max by ({PIPELINE}, type) (trimtab_condition{{{S},status="True"}})'},
        "state-timeline",
        12,
    ),
    Panel(
        "Feasible plans",
        "0 if no plan meets every constraint within the budget; a plan with relaxed constraints is applied.",
        "short",
        {"{{pipeline}}": f"min by ({PIPELINE}) (trimtab_plan_feasible{{{S}}})"},
        "state-timeline",
        12,
    ),
    Panel(
        "Decisions",
        "Planning decisions per minute: changed, unchanged, or held because the gain was too small.",
        "cpm",
        {"{{outcome}}": f"60 * sum by (outcome) (rate(trimtab_decisions_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Solver time",
        "Time of a planning decision, median and 99th percentile.",
        "s",
        {"p50": quantile(0.5, "trimtab_solve_seconds"), "p99": quantile(0.99, "trimtab_solve_seconds")},
    ),
    Panel(
        "Reconciliations",
        "Reconciliations of the operator per second, by outcome.",
        "ops",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_reconciles_total[{R}]))"},
    ),
    Panel(
        "Reconciliation time",
        "99th percentile of the time of one reconciliation.",
        "s",
        {"p99": f"histogram_quantile(0.99, sum by (le) (rate(trimtab_reconcile_seconds_bucket[{R}])))"},
    ),
    Panel(
        "Writes to the API server",
        "Objects that the operator applied or deleted per second, by kind.",
        "wps",
        {"{{kind}}": zero(f"sum by (kind) (rate(trimtab_api_writes_total[{R}]))", kind="none")},
    ),
    Panel(
        "Time since the last change",
        "Time since the adapter last changed a pipeline's plan.",
        "s",
        {"{{pipeline}}": f"time() - max by ({PIPELINE}) (trimtab_plan_changed_timestamp_seconds{{{S}}})"},
    ),
    Panel(
        "Client errors",
        "Requests that were refused because of the client, or cancelled by it before the SLO.",
        "reqps",
        {"{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_client_errors_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Unsuccessful requests without client errors",
        "Late, dropped, refused and failed requests, without client errors; used by the alerts.",
        "reqps",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S}}}[{R}])) "
            f'- sum by ({PIPELINE}) (rate(trimtab_requests_total{{{S},outcome="ok"}}[{R}])) '
            f"- sum by ({PIPELINE}) (rate(trimtab_client_errors_total{{{S}}}[{R}]))"
        },
    ),
    Panel(
        "Requests in flight relative to the limit",
        "Requests in flight over the concurrency limit; near 1 the routers refuse requests.",
        "percentunit",
        {
            "{{pipeline}}": f"sum by ({PIPELINE}) (trimtab_requests_in_flight{{{S}}}) "
            f"/ sum by ({PIPELINE}) (trimtab_concurrency_limit{{{S}}})"
        },
    ),
)
