"""Panels of one pipeline's requests."""

from trimtab_pipelines.error_codes import CLIENT_ERRORS, CLIENT_LIMIT_REASONS, PROXY_REASONS
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, refusals, zero

CODES = "|".join(sorted(code.name for code in CLIENT_ERRORS))
BOUNDS = "|".join(sorted(CLIENT_LIMIT_REASONS))
PROXY = "|".join(sorted(PROXY_REASONS))

REQUESTS = (
    Panel(
        "Load and forecast",
        "Arriving requests per second, their observed peak, and the forecast peak of the plan.",
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
        "The outcomes add up to all received requests.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate(trimtab_requests_total{{{S}}}[{R}]))"},
    ),
    Panel(
        "Plan: replicas by stage and variant",
        "Planned replicas. A change of variant ends one line and begins another.",
        "short",
        {"{{stage}} {{variant}}": f"max by (stage, variant) (trimtab_planned_replicas{{{S}}})"},
    ),
    Panel(
        "Replicas: desired and ready",
        "Replicas that the operator requests, and ready ones; a condition reports a lasting difference.",
        "short",
        {"{{stage}} {{state}}": f"sum by (stage, state) (trimtab_replicas{{{S}}})"},
    ),
    Panel(
        "Replicas available to the router",
        "Replicas that the router may send batches to.",
        "short",
        {"{{stage}}": f"min by (stage) (trimtab_ready_replicas{{{S}}})"},
    ),
    Panel(
        "Planned and expected accuracy",
        "Accuracy of the plan, and mean expected accuracy of responses.",
        "percentunit",
        {"planned": f"max(trimtab_planned_accuracy{{{S}}})", "expected": mean("trimtab_expected_accuracy")},
    ),
    Panel(
        "Latency and SLO",
        "Latency percentiles, the planned latency, and the SLO.",
        "s",
        {
            "p50": quantile(0.5, "trimtab_request_latency_seconds"),
            "p99": quantile(0.99, "trimtab_request_latency_seconds"),
            "planned": f"max(trimtab_planned_latency_seconds{{{S}}})",
            "SLO": f"max(trimtab_slo_seconds{{{S}}})",
        },
    ),
    Panel(
        "Drops by reason",
        "Requests dropped before their deadline because they could not meet it, by stage and reason.",
        "reqps",
        {
            "{{stage}} {{reason}}": zero(
                f"sum by (stage, reason) (rate(trimtab_drops_total{{{S}}}[{R}]))", stage="no stage", reason="none"
            )
        },
    ),
    Panel(
        "Server-side refusals and failures",
        "Requests refused for lack of capacity or replicas, or failed; they count against the SLO and trigger alerts.",
        "reqps",
        {"{{code}} {{reason}}": refusals(f'code!~"{CODES}",reason!~"{BOUNDS}"')},
        width=6,
    ),
    Panel(
        "Client error refusals",
        "Malformed, too large, too slow, unauthenticated or rate-limited requests; they trigger no alert.",
        "reqps",
        {"{{code}} {{reason}}": refusals(f'code=~"{CODES}"', f'reason=~"{BOUNDS}"')},
        width=6,
    ),
    Panel(
        "Refusals of the proxy",
        "By reason; the router also uses Overload and PayloadTooLarge.",
        "reqps",
        {
            "{{reason}}": zero(
                f'sum by (reason) (rate(trimtab_refusals_total{{{S},reason=~"{PROXY}"}}[{R}]))', reason="none"
            )
        },
        width=6,
    ),
    Panel(
        "Requests in flight and limit",
        "Admitted requests without a response, and the concurrency limit; above it, requests are refused (Overload).",
        "short",
        {"in flight": f"sum(trimtab_requests_in_flight{{{S}}})", "limit": f"sum(trimtab_concurrency_limit{{{S}}})"},
        width=6,
    ),
)
