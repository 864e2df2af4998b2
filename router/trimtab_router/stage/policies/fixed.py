"""The plan's operating point, whatever the slack."""

from trimtab_router.stage.policies import BatchView


def choose(batch: BatchView) -> str:
    """Name the operating point the plan prefers."""
    return batch.planned_point
