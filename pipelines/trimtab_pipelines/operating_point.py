"""How a loaded variant runs one batch: every knob that a batch may turn without a reload, and what it is then worth.

A field that is not given leaves its knob alone. Which knobs there are is up to the family that runs the variant: one
that does not know a knob refuses the point and names it. What a user's own container does with a point is its affair;
it is told the name.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis, AccuracyEvidence, declared_accuracy
from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation, EscalationPlan
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.tasks import MAX_TASKS
from trimtab_pipelines.tensors import TensorName

AccuracyByTask = dict[Name, Accuracy]
Precision = Literal["FP32", "BF16", "FP16", "INT8"]


class StageInputLike(Protocol):
    """An input of a stage."""

    @property
    def name(self) -> str:
        """As the stage calls it."""

    @property
    def optional(self) -> bool:
        """Whether the stage runs without it."""


class TokenMerging(Model):
    """Tokens that a transformer merges on its way, so that later layers have fewer."""

    schedule: tuple[Annotated[int, Field(ge=0, le=4096)], ...] = Field(
        min_length=1, max_length=256, description="Tokens merged away in each layer; one number counts for every layer"
    )
    rule: Name | None = Field(default=None, description="How they are matched, as the family calls it; else its own")

    def __str__(self) -> str:
        listed = ", ".join(str(merged) for merged in self.schedule)
        where = "in each layer" if len(self.schedule) == 1 else "layer by layer"
        return f"merges {listed} tokens {where}" + (f" by {self.rule}" if self.rule else "")


class TokenPrompts(Model):
    """Learned tokens that a transformer is given beside its own."""

    count: int = Field(ge=1, le=1024, description="Prompt tokens a layer")
    mode: Literal["Replace", "Accumulate"] = Field(
        default="Replace", description="Each layer's prompts take the place of those before, or join them"
    )

    def __str__(self) -> str:
        return f"adds {self.count} prompts ({self.mode})"


class InputSize(Model):
    """How large a model sees its images."""

    resolution: int | None = Field(default=None, ge=1, le=16384, description="Pixels a side that images are resized to")
    patch: int | None = Field(default=None, ge=1, le=1024, description="Pixels a side of what becomes one token")

    @model_validator(mode="after")
    def _require_any(self) -> Self:
        if self.resolution is None and self.patch is None:
            raise ValueError("inputSize: give resolution, patch, or both")
        return self

    def __str__(self) -> str:
        sides = [f"images of {self.resolution} pixels"] if self.resolution is not None else []
        return ", ".join([*sides, *([f"patches of {self.patch} pixels"] if self.patch is not None else [])])


class OperatingPoint(Model):
    """How a loaded variant runs one batch."""

    name: Name = "default"
    modalities: tuple[TensorName, ...] = Field(
        default=(), max_length=16, description="Inputs it reads; empty means all"
    )
    token_delta: int | None = Field(
        default=None,
        strict=True,
        ge=-4096,
        le=1024,
        description="Short for merging.schedule where below 0 (tokens merged per layer), and for prompts.count where "
        "above",
    )
    merging: TokenMerging | None = None
    prompts: TokenPrompts | None = None
    precision: Precision | None = Field(default=None, description="Numbers it computes with")
    compiled: Name | None = Field(default=None, description="Compiled form it runs, as the family calls it")
    input_size: InputSize | None = None
    accuracy: Fraction
    accuracy_evidence: AccuracyEvidence | None = Field(
        default=None, description="What stands behind its accuracy; without it the figure is only declared"
    )
    accuracy_by_task: AccuracyByTask = Field(
        default_factory=dict,
        max_length=MAX_TASKS,
        exclude_if=is_empty,
        description="Accuracy on single tasks, where it was measured",
    )
    escalations: tuple[Escalation, ...] = Field(
        default=(),
        max_length=MAX_ESCALATIONS,
        exclude_if=is_empty,
        description="Measured gains of escalating its low-confidence rows; requires the stage's confidence output",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_token_delta(cls, given: Any) -> Any:
        """Read a delta as what it is short for, so that there is one way to ask what a point does."""
        if not isinstance(given, dict):
            return given
        names = ("tokenDelta", "token_delta")
        delta = next((given[name] for name in names if name in given), None)
        if isinstance(delta, bool) or not isinstance(delta, int) or not -4096 <= delta <= 1024:
            return given  # the field's own check says what is wrong
        if delta and (given.get("merging") or given.get("prompts")):
            raise ValueError("tokenDelta is short for merging or prompts: give one or the other")
        rest = {name: value for name, value in given.items() if name not in names}
        if not delta:
            return rest
        return {**rest, "merging": {"schedule": [-delta]}} if delta < 0 else {**rest, "prompts": {"count": delta}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        declared_accuracy(self.accuracy, self.accuracy_evidence)
        return self

    @property
    def knobs(self) -> dict[str, str]:
        """What it turns, by the name of the field, in words."""
        turned = {
            "modalities": f"reads {', '.join(self.modalities)}" if self.modalities else None,
            "merging": self.merging,
            "prompts": self.prompts,
            "precision": self.precision,
            "compiled": self.compiled,
            "inputSize": self.input_size,
        }
        return {name: str(value) for name, value in turned.items() if value is not None}

    def batch_inputs(self, inputs: Iterable[StageInputLike]) -> frozenset[str] | None:
        """Which of a stage's inputs its batches take along; None for all.

        They are those it reads, and those that the stage cannot run without.
        """
        if not self.modalities:
            return None
        return frozenset(self.modalities) | {given.name for given in inputs if not given.optional}

    def measured_accuracy(self, task: str = "") -> Accuracy:
        """Its accuracy with what stands behind it: on a task where that is known, else overall."""
        return self.accuracy_by_task.get(task) or declared_accuracy(self.accuracy, self.accuracy_evidence)

    def without_evidence(self) -> "OperatingPoint":
        """It without what stands behind its accuracy: who serves it needs no proof."""
        return self.model_copy(update={"accuracy_evidence": None, "accuracy_by_task": {}, "escalations": ()})

    def planned_escalations(self, basis: AccuracyBasis) -> tuple[EscalationPlan, ...]:
        """Its second looks with the accuracy that counts."""
        return tuple(look.planned(basis) for look in self.escalations)

    def accuracies_by_task(self, basis: AccuracyBasis) -> dict[str, float]:
        """The figure that counts for each task that is known."""
        return {task: accuracy.on(basis) for task, accuracy in self.accuracy_by_task.items()}
