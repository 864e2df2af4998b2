"""`StageStats`: metrics and log lines of one stage's batches."""

import logging

from trimtab_protocol.sanitize import printable
from trimtab_router.observability.metrics import StageMetrics

log = logging.getLogger(__name__)


class StageStats:
    """Statistics of one stage, as its scheduler reports them."""

    def __init__(self, stage: str, metrics: StageMetrics) -> None:
        self._stage = stage
        self.observe_queue_seconds = metrics.queue_seconds.observe
        self.observe_batch = metrics.served
        self.count_escalated_rows = metrics.escalated
        self.count_deduplicated_row = metrics.shared
        self.count_early_prefill = metrics.early_prefills
        self.count_retry = metrics.retried
        self.count_cancelled_row = metrics.cancelled
        self._count_policy_error = metrics.policy_errors
        self._logged_errors: set[type[Exception]] = set()

    def record_policy_error(self, error: Exception) -> None:
        """Count a failure of the policy. Each kind of error is logged once, since there may be thousands a second."""
        self._count_policy_error()
        if type(error) not in self._logged_errors:
            self._logged_errors.add(type(error))
            log.error(
                "stage %s: its scheduling policy failed; EarliestDeadlineFirst decides instead",
                self._stage,
                exc_info=error,
            )

    def record_replica_error(self, message: str) -> None:
        log.warning("stage %s: %s", self._stage, printable(message))

    def record_request_error(self, request_id: str, message: str) -> None:
        log.error("stage %s: request %r failed: %s", self._stage, request_id, printable(message))
