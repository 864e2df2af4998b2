"""Row counts of one stage: rows by the point that served them, escalated rows, and rows of low confidence."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from trimtab_pipelines.escalation import Key
from trimtab_pipelines.router_state import LowConfidenceRows, ReportedRows
from trimtab_pipelines.row_shares import answered_rows
from trimtab_router.observability.tallies import Count

RECENT_SECONDS = 60.0
MIN_SNAPSHOT_SECONDS = 1.0


@dataclass(slots=True)
class RecentCounts:
    """Increase of counters over the last minute, from their values at earlier calls."""

    _snapshots: deque[tuple[float, Mapping[Hashable, float]]] = field(default_factory=lambda: deque([(-math.inf, {})]))

    def increase(self, now: float, counts: Mapping[Hashable, float]) -> Counter[Hashable]:
        """Positive increases since a call at least a minute ago; since the start if there was none."""
        snapshots = self._snapshots
        while len(snapshots) > 1 and snapshots[1][0] <= now - RECENT_SECONDS:
            snapshots.popleft()
        before = snapshots[0][1]
        if now >= snapshots[-1][0] + MIN_SNAPSHOT_SECONDS:
            snapshots.append((now, dict(counts)))
        return +Counter({name: count - before.get(name, 0.0) for name, count in counts.items()})


@dataclass(slots=True)
class RowCounts:
    """Counts since the start."""

    served: dict[Key, Count] = field(default_factory=dict)
    """An escalated row counts at both of its points."""
    escalated: dict[tuple[Key, Key], Count] = field(default_factory=dict)
    """Rows that were served again, by their first and their second point."""
    low_confidence: defaultdict[tuple[Key, float], tuple[Count, Count]] = field(
        default_factory=lambda: defaultdict(lambda: (Count(), Count()))
    )
    """Rows whose confidence was compared to a threshold, and those below it, by point and threshold."""
    _recent: RecentCounts = field(default_factory=RecentCounts)
    _recent_low: RecentCounts = field(default_factory=RecentCounts)

    def recent_rows(self, now: float) -> list[ReportedRows]:
        """Rows of the last minute by the point that answered them."""
        counts: dict[Hashable, float] = {key: count.value for key, count in self.served.items()}
        counts |= {pair: count.value for pair, count in self.escalated.items()}
        recent = self._recent.increase(now, counts)
        served = {key: recent[key] for key in self.served}
        return ReportedRows.list_of(answered_rows(served, {pair: recent[pair] for pair in self.escalated}))

    def recent_low_confidence(self, now: float) -> list[LowConfidenceRows]:
        """Rows of the last minute that were compared to thresholds."""
        counts: dict[Hashable, float] = {
            (name, n): count.value for name, pair in self.low_confidence.items() for n, count in enumerate(pair)
        }
        recent = self._recent_low.increase(now, counts)
        return [
            LowConfidenceRows(
                variant=variant,
                operating_point=point,
                confidence_below=below,
                rows=int(rows),
                low_rows=int(recent[((variant, point), below), 1]),
            )
            for (variant, point), below in self.low_confidence
            if (rows := recent[((variant, point), below), 0])
        ]
