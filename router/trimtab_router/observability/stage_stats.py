"""Shell: counts what becomes of a stage's batches, and tells the log what went wrong."""

import logging

from trimtab_protocol.sanitize import printable
from trimtab_router.observability.metrics import StageMetrics

log = logging.getLogger(__name__)


class StageStats:
    """The tally of one stage."""

    def __init__(self, stage: str, metrics: StageMetrics) -> None:
        self._stage = stage
        self.waited = metrics.queue_seconds.observe
        self.served = metrics.served
        self.looks_again = metrics.looks_again
        self.shared = metrics.shared
        self.began_early = metrics.early_prefills
        self.retried = metrics.retried
        self.abandoned = metrics.abandoned
        self._count_undecided = metrics.undecided
        self._errors_told: set[type[Exception]] = set()

    def undecided(self, error: Exception) -> None:
        """The policy failed; the log is told once of each kind of error, for there may be thousands a second."""
        self._count_undecided()
        if type(error) not in self._errors_told:
            self._errors_told.add(type(error))
            log.error(
                "stage %s: its departure policy failed; EarliestDeadlineFirst decides instead",
                self._stage,
                exc_info=error,
            )

    def troubled(self, message: str) -> None:
        """A replica did not do what it should."""
        log.warning("stage %s: %s", self._stage, printable(message))

    def failed(self, request_id: str, message: str) -> None:
        """A request ends for a fault of ours."""
        log.error("stage %s: request %r failed: %s", self._stage, request_id, printable(message))
