"""`FirstTokenTimes`: predicted times to first token of a stage, by the tokens that a replica has to prefill.

A chat whose prefix a replica holds begins in a tenth of the time of another one. The prediction is the regression line
of the stage's recent chats, whichever replica served them, so that long prompts do not make a replica appear slow.
"""

from trimtab_router.scheduling.interfaces import Feature
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome

WEIGHT = 0.05
"""Of the latest chat in the means."""
MIN_SHARE = 0.2
"""Smallest prediction, in mean times."""


class Line:
    """Regression line through points, of which each counts less than the next."""

    def __init__(self) -> None:
        self._points = 0
        self._mean_x = self._mean_y = self._variance = self._covariance = 0.0

    def predict(self, x: float) -> float:
        """The line at x, at least `MIN_SHARE` of the mean; it does not fall."""
        slope = max(self._covariance / self._variance, 0.0) if self._variance > 0 else 0.0
        return max(self._mean_y + slope * (x - self._mean_x), MIN_SHARE * self._mean_y)

    def add(self, x: float, y: float) -> None:
        self._points += 1
        weight = max(WEIGHT, 1.0 / self._points)
        from_x, from_y = x - self._mean_x, y - self._mean_y
        self._mean_x += weight * from_x
        self._mean_y += weight * from_y
        self._variance += weight * ((1.0 - weight) * from_x * from_x - self._variance)
        self._covariance += weight * ((1.0 - weight) * from_x * from_y - self._covariance)


class FirstTokenTimes(Feature):
    """Tokens that replicas had to prefill when they got a chat, and the line of the times to first token by them."""

    def __init__(self) -> None:
        self._line = Line()
        self._tokens: dict[Batch, float] = {}

    def on_dispatch(self, batch: Batch) -> None:
        self._tokens[batch] = batch.replica.pending_tokens

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:  # noqa: ARG002
        self._tokens.pop(batch, None)

    def observe(self, batch: Batch, seconds: float) -> float:
        """Return the seconds that were to be expected, and learn from those that it took."""
        tokens = self._tokens.get(batch, 0.0)
        self._line.add(tokens, seconds)
        return self._line.predict(tokens)
