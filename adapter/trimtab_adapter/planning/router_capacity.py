"""Router capacity: the number of routers that carry a load, from the measured CPU time of a request.

A router computes on one thread, so its capacity is one core, whatever its pod requests.
"""

from math import ceil

from trimtab_pipelines.spec import RouterSettings

UTILIZATION = 0.6
"""Planned share of a router's core; the rest absorbs bursts, since all requests wait for the same thread."""
RELEASE_MARGIN = 0.25
"""Load, in routers, by which fewer routers must suffice before one is released."""


def required_routers(settings: RouterSettings, peak_rps: float, cpu_seconds_per_request: float, current: int) -> int:
    """The routers for a load; `current` if the CPU time is unmeasured, which is 0."""
    if not cpu_seconds_per_request:
        return settings.clamp(current)
    load = peak_rps * cpu_seconds_per_request / UTILIZATION
    return settings.clamp(max(ceil(load), min(ceil(load + RELEASE_MARGIN), current)))
