"""`SlowdownEstimate`: latency inflation of generation stages while their SLOs are missed.

While SLO targets are missed, planned latency is inflated by the miss rate (at least 12.5 %) and decays after intervals
without misses, because a profile cannot see other load on the machine or chats unlike the profiled ones. Both encoder
placements are inflated alike, so that the one with more spare capacity wins; `relaxation.relax` reduces the factor if
capacity is short.
"""

from dataclasses import dataclass

from trimtab_pipelines.router_state import RecentRequests

MIN_ATTAINMENT = 0.99
"""Share of requests within the SLO below which capacity is added at once (ModServe, section 4.3)."""
QUIET_INTERVALS = 3
"""Decisions without misses before the factor decays."""
STEP = 1.125
MAX_FACTOR = 4.0
MIN_RESPONSES = 50
"""Below this number one late response says nothing about a 99 % target."""


@dataclass(frozen=True, slots=True)
class SlowdownEstimate:
    """Factor by which generation stages and their encoders are slower than profiled."""

    factor: float = 1.0
    """1.0 to 4.0; a machine farther from its profile needs a new profile."""
    attainment: float = 1.0
    """Share of requests within the SLO when the factor was last raised; 1.0 if it was not or has recovered."""
    quiet: int = 0
    """Decisions without misses since then."""

    def after(self, served: RecentRequests) -> "SlowdownEstimate":
        """The next estimate from the outcomes of the last minute.

        That minute includes requests from before the last raise, so the factor rises again only while attainment does
        not improve.
        """
        ended = served.ok + served.late + served.dropped - served.dropped_by_client
        if ended < MIN_RESPONSES:
            return self
        attainment = served.ok / ended
        if attainment < MIN_ATTAINMENT:
            if attainment >= self.attainment < MIN_ATTAINMENT:
                return SlowdownEstimate(self.factor, self.attainment)
            return SlowdownEstimate(
                min(self.factor * max(STEP, 1.0 / max(attainment, 1.0 / MAX_FACTOR)), MAX_FACTOR), attainment
            )
        if self.quiet + 1 < QUIET_INTERVALS:
            return SlowdownEstimate(self.factor, self.attainment, self.quiet + 1)
        return SlowdownEstimate(max(self.factor / STEP, 1.0))
