"""One pipeline: its stages, and the plans they follow. Pure."""

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, zero

STAGES = (
    Panel(
        "Queue",
        "Rows that wait, by stage.",
        "short",
        {"{{stage}}": f"sum by (stage) (trimtab_queue_rows{{{S}}})"},
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
        "Rows by operating point",
        "Share of a stage's rows that each point served; one that was looked at twice counts at both.",
        "percentunit",
        {
            "{{stage}} {{variant}} {{operating_point}}": (
                f"sum by (stage, variant, operating_point) (rate({names.POINT_ROWS}{{{S}}}[{R}])) "
                f"/ on (stage) group_left sum by (stage) (rate({names.POINT_ROWS}{{{S}}}[{R}]))"
            )
        },
    ),
    Panel(
        "Second looks",
        "Rows that were looked at a second time, as a share of a stage's looks.",
        "percentunit",
        {
            "{{stage}}": f"sum by (stage) (rate({names.ESCALATED_ROWS}{{{S}}}[{R}])) "
            f"/ sum by (stage) (rate({names.POINT_ROWS}{{{S}}}[{R}]))"
        },
    ),
    Panel(
        "Provisional answers",
        "Answers with rows whose second look did not come in time, as a share of those in time.",
        "percentunit",
        {
            "provisional": f"sum(rate({names.UNESCALATED_RESPONSES}{{{S}}}[{R}])) "
            f'/ sum(rate({names.REQUESTS}{{{S},outcome="ok"}}[{R}]))'
        },
    ),
    Panel(
        "Drifted accuracies",
        "Points that are no longer as accurate as they were measured to be; the plan stands on what is observed.",
        "short",
        {"{{stage}}": f"max by (stage) ({names.DRIFTED_POINTS}{{{S}}})"},
    ),
    Panel("Solver time", "Time to decide, 99th percentile.", "s", {"p99": quantile(0.99, "trimtab_solve_seconds")}),
    Panel(
        "Plan decided and plan in force",
        "Generations; the router follows what the adapter decides within milliseconds.",
        "short",
        {"decided": f"max(trimtab_planned_generation{{{S}}})", "in force": f"min(trimtab_plan_generation{{{S}}})"},
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
