"""Looking twice, as documents tell it: all rows at one operating point, then the least certain of them at another."""

from pydantic import Field

from trimtab_pipelines.accuracy_evidence import AccuracyBasis, accuracy_on_basis
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.tasks import MAX_TASKS

MAX_ESCALATIONS = 64
"""Of one operating point."""


_LOW = "Floor that this accuracy keeps with 95 % confidence, for rows nobody has seen yet"
_BY_TASK = "Thresholds of single tasks; where there are any, rows of other tasks are not looked at again"


class TaskEscalation(Model):
    """What becomes of one task's rows where each task has a threshold of its own."""

    confidence_below: float = Field(
        ge=0, le=2, description="Confidence that too little is; 0: its rows are never seen again"
    )
    share: Fraction = Field(description="Share of its rows that are less certain")
    accuracy: Fraction = Field(description="Of all its rows together, once that is done")
    accuracy_low: Fraction | None = Field(default=None, description=_LOW, exclude_if=lambda low: low is None)

    def on(self, basis: AccuracyBasis) -> float:
        """Return the accuracy that counts."""
        return accuracy_on_basis(basis, self.accuracy, self.accuracy_low)


class EscalationPlan(Model):
    """A second look that a stage may take at rows it has served at a point."""

    to: Name = Field(description="Operating point that sees the least certain rows again")
    confidence_below: float = Field(
        ge=0, le=2, description="Confidence that too little is; above 1: all rows are seen again"
    )
    share: Fraction = Field(description="Share of the rows that are less certain, as measured")
    accuracy: Fraction = Field(description="Of all rows together, once that is done")
    by_task: dict[Name, TaskEscalation] = Field(
        default_factory=dict, max_length=MAX_TASKS, exclude_if=is_empty, description=_BY_TASK
    )

    def __str__(self) -> str:
        return f"{self.to} {100 * self.share:.0f} %"


class Escalation(EscalationPlan):
    """What was measured, on held-out rows, of looking again at those that a point is not certain of.

    With thresholds by task, `below` is what as many rows of all tasks are less certain than.
    """

    accuracy_low: Fraction | None = Field(default=None, description=_LOW)
    samples: int | None = Field(default=None, gt=0, description="Held-out rows behind the figures")

    def planned(self, basis: AccuracyBasis) -> EscalationPlan:
        """It with the accuracy that counts, overall and of each task."""
        return EscalationPlan(
            to=self.to,
            confidence_below=self.confidence_below,
            share=self.share,
            accuracy=accuracy_on_basis(basis, self.accuracy, self.accuracy_low),
            by_task={
                task: TaskEscalation(confidence_below=one.confidence_below, share=one.share, accuracy=one.on(basis))
                for task, one in self.by_task.items()
            },
        )
