"""Tells a replica that hangs from one that is busy, once its router cannot use it. Pure."""

from dataclasses import dataclass

IDLE_SECONDS = 0.6
"""How long one that computes nothing may give no answer: longer than a lost connection takes to be made again."""
BUSY_SECONDS = 20.0
"""The same for one that computes: something that takes long may be going on."""


@dataclass(frozen=True, slots=True)
class HangDetector:
    """A replica without an answer to its router. Times are monotonic seconds.

    Attributes:
        since: when it was first seen so.
        computed_at: when it was last seen to compute; `since` where it never was.
    """

    since: float
    computed_at: float

    @classmethod
    def update(cls, before: "HangDetector | None", now: float, *, computes: bool) -> "HangDetector":
        """Go on from what was known before."""
        since = before.since if before else now
        computed_at = now if computes or before is None else before.computed_at
        return cls(since, computed_at)

    def hangs(self, now: float) -> bool:
        """Whether it has been silent for longer than it may."""
        return now - self.computed_at >= IDLE_SECONDS or now - self.since >= BUSY_SECONDS
