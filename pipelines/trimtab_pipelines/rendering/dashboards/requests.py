"""One pipeline: what arrives, what becomes of it, how long it takes. Pure."""

from trimtab_pipelines.error_codes import CLIENT_ERRORS, CLIENT_LIMIT_REASONS, PROXY_REASONS
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, refusals, zero

CODES = "|".join(sorted(code.name for code in CLIENT_ERRORS))
BOUNDS = "|".join(sorted(CLIENT_LIMIT_REASONS))
PROXY = "|".join(sorted(PROXY_REASONS))

REQUESTS = (
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
        {"expected": f"max(trimtab_planned_accuracy{{{S}}})", "served": mean("trimtab_expected_accuracy")},
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
                f'sum by (reason) (rate(trimtab_refusals_total{{{S},reason=~"{PROXY}"}}[{R}]))', reason="none"
            )
        },
        width=6,
    ),
    Panel(
        "Requests under way against the window",
        "Let in and not answered yet, and how many may be; who comes while it is full is refused with Overload.",
        "short",
        {"under way": f"sum(trimtab_requests_in_flight{{{S}}})", "window": f"sum(trimtab_concurrency_limit{{{S}}})"},
        width=6,
    ),
)
