"""Escalation: rows with low confidence at one operating point are served again at a more accurate one.

The second operating point is of the same variant, or of another one: on the same replica, or in another replica group.
"""

from pydantic import Field

from trimtab_pipelines.accuracy_evidence import AccuracyBasis, accuracy_on_basis
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.tasks import MAX_TASKS

Key = tuple[str, str]
"""Variant and operating point."""
MAX_ESCALATIONS = 64
"""Per operating point."""


class TaskEscalation(Model):
    """Escalation threshold of one task."""

    confidence_below: float = Field(ge=0, le=2)
    """Rows with less confidence are escalated; 0 escalates none."""
    share: Fraction
    """Share of the task's rows that are escalated."""
    accuracy: Fraction
    """Accuracy of all of the task's rows after escalation."""
    accuracy_low: Fraction | None = Field(default=None, exclude_if=lambda low: low is None)
    """Lower 95 % confidence bound of this accuracy for unseen rows."""

    def on(self, basis: AccuracyBasis) -> float:
        return accuracy_on_basis(basis, self.accuracy, self.accuracy_low)


class EscalationPlan(Model):
    """An escalation that a stage may use for rows served at an operating point."""

    to: Name
    """Operating point that serves the escalated rows."""
    variant: Name | None = Field(default=None, exclude_if=lambda variant: variant is None)
    """Variant that serves the escalated rows; the same variant if absent."""
    confidence_below: float = Field(ge=0, le=2)
    """Rows with less confidence are escalated; a value above 1 escalates all."""
    share: Fraction
    """Share of rows that are escalated, as measured."""
    accuracy: Fraction
    """Accuracy of all rows after escalation."""
    by_task: dict[Name, TaskEscalation] = Field(default_factory=dict, max_length=MAX_TASKS, exclude_if=is_empty)
    """Thresholds of individual tasks; if present, rows of other tasks are not escalated."""

    def target(self, variant: str) -> Key:
        """Variant and operating point that serve the escalated rows of a variant."""
        return self.variant or variant, self.to

    def __str__(self) -> str:
        to = "/".join(filter(None, (self.variant, self.to)))
        return f"{100 * self.share:.0f} % escalated to {to.removesuffix('/default')}"


class Escalation(EscalationPlan):
    """Measured escalation on held-out rows.

    With thresholds by task, `confidenceBelow` is the overall threshold that escalates as many rows.
    """

    accuracy_low: Fraction | None = None
    """Lower 95 % confidence bound of this accuracy for unseen rows."""
    samples: int | None = Field(default=None, gt=0)
    """Number of held-out rows."""

    def planned(self, basis: AccuracyBasis) -> EscalationPlan:
        """The escalation with the accuracy to use, overall and for each task."""
        return EscalationPlan(
            to=self.to,
            variant=self.variant,
            confidence_below=self.confidence_below,
            share=self.share,
            accuracy=accuracy_on_basis(basis, self.accuracy, self.accuracy_low),
            by_task={
                task: TaskEscalation(
                    confidence_below=threshold.confidence_below, share=threshold.share, accuracy=threshold.on(basis)
                )
                for task, threshold in self.by_task.items()
            },
        )
