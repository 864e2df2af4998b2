"""Panels of one pipeline's stages and plans."""

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, zero

STAGES = (
    Panel("Queue", "Queued rows, by stage.", "short", {"{{stage}}": f"sum by (stage) (trimtab_queue_rows{{{S}}})"}),
    Panel(
        "Time in the queue",
        "99th percentile of the time from enqueueing to dispatch.",
        "s",
        {"{{stage}}": quantile(0.99, "trimtab_stage_queue_seconds", "stage")},
    ),
    Panel(
        "Batch fill",
        "Mean batch size over the planned one. A low fill with a long queue means that replicas are the bottleneck.",
        "percentunit",
        {
            "{{stage}}": f"{mean('trimtab_batch_size_rows', 'stage')} "
            f"/ on (stage) max by (stage) (trimtab_planned_batch_size_rows{{{S}}})"
        },
    ),
    Panel(
        "Service time",
        "99th percentile of the time from a batch's dispatch to its response.",
        "s",
        {"{{stage}} {{variant}}": quantile(0.99, "trimtab_stage_service_seconds", "stage, variant")},
    ),
    Panel(
        "Service time relative to the profile",
        "Observed over profiled service time. Well above 1 the nodes are slower than when profiled: profile again.",
        "short",
        {"{{stage}} {{variant}}": f"max by (stage, variant) (trimtab_service_ratio{{{S}}})"},
    ),
    Panel(
        "Cores and budget",
        "Cores requested by replicas, planned cores, and the budget.",
        "short",
        {
            "allocated": f"max(trimtab_allocated_cores{{{S}}})",
            "planned": f"max(trimtab_planned_cores{{{S}}})",
            "budget": f"max(trimtab_budget_cores{{{S}}})",
        },
    ),
    Panel(
        "Rows by operating point",
        "Share of a stage's rows served at each point; an escalated row counts at both.",
        "percentunit",
        {
            "{{stage}} {{variant}} {{operating_point}}": (
                f"sum by (stage, variant, operating_point) (rate({names.POINT_ROWS}{{{S}}}[{R}])) "
                f"/ on (stage) group_left sum by (stage) (rate({names.POINT_ROWS}{{{S}}}[{R}]))"
            )
        },
    ),
    Panel(
        "Escalations",
        "Escalated rows as a share of all rows that a stage served.",
        "percentunit",
        {
            "{{stage}}": f"sum by (stage) (rate({names.ESCALATED_ROWS}{{{S}}}[{R}])) "
            f"/ sum by (stage) (rate({names.POINT_ROWS}{{{S}}}[{R}]))"
        },
    ),
    Panel(
        "Unescalated responses",
        "Responses with rows that were not escalated in time, as a share of those on time.",
        "percentunit",
        {
            "unescalated": f"sum(rate({names.UNESCALATED_RESPONSES}{{{S}}}[{R}])) "
            f'/ sum(rate({names.REQUESTS}{{{S},outcome="ok"}}[{R}]))'
        },
    ),
    Panel(
        "Drifted accuracies",
        "Operating points whose observed accuracy differs from the profiled one; plans use the observed accuracy.",
        "short",
        {"{{stage}}": f"max by (stage) ({names.DRIFTED_POINTS}{{{S}}})"},
    ),
    Panel("Solver time", "Planning time, 99th percentile.", "s", {"p99": quantile(0.99, "trimtab_solve_seconds")}),
    Panel(
        "Decided and applied plan",
        "Plan generations; the router applies a new plan within milliseconds.",
        "short",
        {"decided": f"max(trimtab_planned_generation{{{S}}})", "applied": f"min(trimtab_plan_generation{{{S}}})"},
    ),
    Panel(
        "Why the last plan changed",
        "What changed from the previous plan, and why.",
        "short",
        {"{{change}}": f"max by (change) (trimtab_last_change_info{{{S}}})"},
        "table",
        12,
    ),
    Panel(
        "Conditions",
        "1 if the condition is True.",
        "short",
        {"{{type}}": f'max by (type) (trimtab_condition{{{S},status="True"}})'},
        "state-timeline",
        12,
    ),
    Panel(
        "Retries",
        "Row slices retried on another replica per second, by reason.",
        "ops",
        {
            "{{stage}} {{reason}}": zero(
                f"sum by (stage, reason) (rate(trimtab_retries_total{{{S}}}[{R}]))", stage="no stage", reason="none"
            )
        },
    ),
)
