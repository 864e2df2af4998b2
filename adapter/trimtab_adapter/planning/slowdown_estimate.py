"""Who writes is taken to be slower than profiled while promises are broken: at once, less after quiet decisions.

A profile is content where a machine is not: others use it, or chats are not like those that were measured. How much is
wrong nobody knows, so as much is added to the seconds as was not kept, and one in eight at the least
(`token_pools.scale` adds that to replicas). Both layouts count as slower, so that the one with more to spare is found;
where there is less to spare, less is spared (`least_bad.eased`).
"""

from dataclasses import dataclass

from trimtab_pipelines.router_state import RecentRequests

MIN_ATTAINMENT = 0.99
"""Share of requests within the SLO below which capacity is added at once (ModServe, section 4.3)."""
QUIET_INTERVALS = 3
STEP = 1.125
MOST = 4.0
MIN_RESPONSES = 50
"""Of fewer, one that was late says nothing of one in a hundred."""


@dataclass(frozen=True, slots=True)
class SlowdownEstimate:
    """How much slower than profiled who writes, and who encodes for them, is taken to be."""

    factor: float = 1.0
    """Of the profiled seconds, 1.0 to 4.0: a machine that is farther from its profile needs a new one."""
    attainment: float = 1.0
    """Share of promises kept when it was last raised; 1.0 where it was not, or it has recovered."""
    quiet: int = 0
    """Decisions since then at which promises were kept."""

    def after(self, served: RecentRequests) -> "SlowdownEstimate":
        """The next one, by what became of the requests of the last minute.

        That minute also has those from before it was raised: so it is raised again only while no more are kept.
        """
        ended = served.ok + served.late + served.dropped
        if ended < MIN_RESPONSES:
            return self
        attainment = served.ok / ended
        if attainment < MIN_ATTAINMENT:
            if attainment >= self.attainment < MIN_ATTAINMENT:
                return SlowdownEstimate(self.factor, self.attainment)
            return SlowdownEstimate(min(self.factor * max(STEP, 1.0 / max(attainment, 1.0 / MOST)), MOST), attainment)
        if self.quiet + 1 < QUIET_INTERVALS:
            return SlowdownEstimate(self.factor, self.attainment, self.quiet + 1)
        return SlowdownEstimate(max(self.factor / STEP, 1.0))
