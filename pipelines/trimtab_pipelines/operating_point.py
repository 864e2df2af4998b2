"""`OperatingPoint`: the settings of one batch that need no reload, and their accuracy.

Absent fields leave a setting at its default. Each family supports some settings and rejects operating points with
others, naming the setting. A user-provided container receives only the point's name.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import (
    Accuracy,
    AccuracyBasis,
    AccuracyEvidence,
    accuracy_on_basis,
    declared_accuracy,
)
from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation, EscalationPlan
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty
from trimtab_pipelines.tasks import MAX_TASKS
from trimtab_pipelines.tensors import TensorName

AccuracyByTask = dict[Name, Accuracy]
Precision = Literal["FP32", "BF16", "FP16", "INT8"]


class StageInputLike(Protocol):
    """Name and optionality of a stage input."""

    @property
    def name(self) -> str: ...

    @property
    def optional(self) -> bool: ...


class TokenMerging(Model):
    """Token merging in a transformer, so that later layers process fewer tokens."""

    schedule: tuple[Annotated[int, Field(ge=0, le=4096)], ...] = Field(min_length=1, max_length=256)
    """Tokens merged in each layer. A single number applies to every layer."""
    rule: Name | None = None
    """Matching rule, by its name in the family. The family's default is used if absent."""

    def __str__(self) -> str:
        listed = ", ".join(str(merged) for merged in self.schedule)
        where = "in each layer" if len(self.schedule) == 1 else "layer by layer"
        return f"merges {listed} tokens {where}" + (f" by {self.rule}" if self.rule else "")


class TokenPrompts(Model):
    """Learned prompt tokens that are added to a transformer's own."""

    count: int = Field(ge=1, le=1024)
    """Prompt tokens in each layer."""
    mode: Literal["Replace", "Accumulate"] = "Replace"
    """Replace: each layer's prompts replace those of the layer before. Accumulate: they are added to them."""

    def __str__(self) -> str:
        return f"adds {self.count} prompts ({self.mode})"


class InputSize(Model):
    """Size of a model's input images."""

    resolution: int | None = Field(default=None, ge=1, le=16384)
    """Side length in pixels to which images are resized."""
    patch: int | None = Field(default=None, ge=1, le=1024)
    """Side length in pixels of the patch that becomes one token."""

    @model_validator(mode="after")
    def _require_any(self) -> Self:
        if self.resolution is None and self.patch is None:
            raise ValueError("inputSize: give resolution, patch, or both")
        return self

    def __str__(self) -> str:
        sides = [f"images of {self.resolution} pixels"] if self.resolution is not None else []
        return ", ".join([*sides, *([f"patches of {self.patch} pixels"] if self.patch is not None else [])])


class OperatingPoint(Model):
    """Settings of one batch on a loaded variant."""

    name: Name = "default"
    modalities: tuple[TensorName, ...] = Field(default=(), max_length=16)
    """Inputs that the point reads; all if empty."""
    token_delta: int | None = Field(default=None, strict=True, ge=-4096, le=1024)
    """Shorthand: a negative number sets merging.schedule (tokens merged in each layer), a positive number sets
    prompts.count.
    """
    merging: TokenMerging | None = None
    prompts: TokenPrompts | None = None
    precision: Precision | None = None
    """Numeric precision of the computation."""
    compiled: Name | None = None
    """Compiled form to run, by its name in the family."""
    input_size: InputSize | None = None
    mm_processor_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, max_length=16, exclude_if=is_empty
    )
    """Options of a third-party engine's image processor for the chats of this point, such as max_pixels."""
    accuracy: Fraction
    accuracy_evidence: AccuracyEvidence | None = None
    """Evidence for the accuracy. Without it the accuracy is only declared."""
    accuracy_by_task: AccuracyByTask = Field(default_factory=dict, max_length=MAX_TASKS, exclude_if=is_empty)
    """Accuracy on individual tasks, if measured."""
    escalations: tuple[Escalation, ...] = Field(default=(), max_length=MAX_ESCALATIONS, exclude_if=is_empty)
    """Measured gains of escalating low-confidence rows of this point. Requires the stage's confidence output."""

    @model_validator(mode="before")
    @classmethod
    def _expand_token_delta(cls, fields: Any) -> Any:
        """Replace `tokenDelta` by the fields that it abbreviates."""
        if not isinstance(fields, dict):
            return fields
        names = ("tokenDelta", "token_delta")
        delta = next((fields[name] for name in names if name in fields), None)
        if isinstance(delta, bool) or not isinstance(delta, int) or not -4096 <= delta <= 1024:
            return fields  # the field's own validation reports the error
        if delta and (fields.get("merging") or fields.get("prompts")):
            raise ValueError("tokenDelta is a shorthand for merging or prompts: set only one of them")
        rest = {name: value for name, value in fields.items() if name not in names}
        if not delta:
            return rest
        return {**rest, "merging": {"schedule": [-delta]}} if delta < 0 else {**rest, "prompts": {"count": delta}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        declared_accuracy(self.accuracy, self.accuracy_evidence)
        return self

    @property
    def knobs(self) -> dict[str, str]:
        """Descriptions of the settings that are present, by field name."""
        values = {
            "modalities": f"reads {', '.join(self.modalities)}" if self.modalities else None,
            "merging": self.merging,
            "prompts": self.prompts,
            "precision": self.precision,
            "compiled": self.compiled,
            "inputSize": self.input_size,
            "mmProcessorKwargs": ", ".join(f"{name} {value}" for name, value in self.mm_processor_kwargs.items())
            or None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def batch_inputs(self, inputs: Iterable[StageInputLike]) -> frozenset[str] | None:
        """The stage inputs that its batches include: those it reads and those the stage requires. None means all."""
        if not self.modalities:
            return None
        return frozenset(self.modalities) | {tensor.name for tensor in inputs if not tensor.optional}

    def measured_accuracy(self, task: str = "") -> Accuracy:
        """Accuracy with its evidence: of the task if known, else overall."""
        return self.accuracy_by_task.get(task) or declared_accuracy(self.accuracy, self.accuracy_evidence)

    def accuracy_on(self, basis: AccuracyBasis) -> float:
        """The overall accuracy on a basis."""
        evidence = self.accuracy_evidence
        return accuracy_on_basis(basis, self.accuracy, None if evidence is None else evidence.low)

    def without_evidence(self) -> "OperatingPoint":
        """A copy without evidence, which serving does not need."""
        return self.replace(accuracy_evidence=None, accuracy_by_task={}, escalations=())

    def planned_escalations(self, basis: AccuracyBasis) -> tuple[EscalationPlan, ...]:
        return tuple(escalation.planned(basis) for escalation in self.escalations)

    def accuracies_by_task(self, basis: AccuracyBasis) -> dict[str, float]:
        return {task: accuracy.on(basis) for task, accuracy in self.accuracy_by_task.items()}
