"""A stage of a pipeline: one task, the variants that can do it, and where its tensors come from."""

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import Seconds
from trimtab_pipelines.resource import Model, Name, require_unique
from trimtab_pipelines.tensors import StageOutput, TensorName, check_confidence_output, check_counts
from trimtab_pipelines.variants import Variant

ANSWER = (("text", "BYTES", ()), ("finish_reason", "BYTES", ()), ("usage", "INT64", (5,)))
"""What a stage that writes puts out: names, datatypes and shapes of a row."""
MESSAGES = "messages"
"""The input of a stage that writes which says what was said so far."""
PULLED = "references"
"""The input of a stage that writes which says where it pulls images' embeddings from, and the output of one that
encodes."""
SHOWN = "images"
"""The input of a stage that encodes, of which each element is a row of its own there."""
OF_CHAT = "chat_images"
"""What its replicas are told beside each, INT64 [2]: how many images its chat has, and which of them it is."""

TRANSFER_SECONDS = 0.005
"""Of embeddings, from replica to replica, where nothing else is known."""

Reference = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]+\.(inputs|outputs)\.[A-Za-z_][A-Za-z0-9_.-]*$",
        max_length=201,
        description="request.inputs.TENSOR or STAGE.outputs.TENSOR",
    ),
]


class StageInput(Model):
    """Where a stage takes one of its tensors from."""

    name: TensorName
    source: Reference = Field(alias="from")
    optional: bool = Field(default=False, description="The stage runs without it where its source is absent")


class PipelineOutput(Model):
    """A tensor the client receives."""

    name: TensorName
    source: Reference = Field(alias="from")


class Pin(Model):
    """What the user holds fixed; a constraint of the program."""

    variant: Name | None = None
    operating_point: Name | None = None
    batch_size: int | None = Field(default=None, ge=1, le=4096)
    replicas: int | None = Field(default=None, ge=1, le=1000)


class Stage(Model):
    """One task, and the variants that can do it."""

    name: Name
    inputs: tuple[StageInput, ...] = Field(min_length=1, max_length=16)
    outputs: tuple[StageOutput, ...] = Field(min_length=1, max_length=16)
    variants: tuple[Variant, ...] = Field(min_length=1, max_length=64)
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64), min_length=1, max_length=32, description="Batch sizes worth planning with"
    )
    min_replicas: int = Field(default=1, ge=1, le=1000)
    max_replicas: int = Field(default=64, ge=1, le=1000)
    hosting: Literal["Shared", "Separate"] = Field(
        default="Shared",
        description="Shared: a replica loads all variants that ask for the same resources, so that a change between "
        "them starts nothing. Separate: one variant a replica",
    )
    repeatable: bool = Field(
        default=True,
        description="A batch whose replica was lost may run again elsewhere. False, for models with effects of "
        "their own: what may have run is not sent again but failed",
    )
    certainty: TensorName | None = Field(
        default=None,
        description="Output that says how certain the model is of each row, best as the probability that it is right: "
        "the least certain rows may be looked at again at a more accurate operating point; drifts are noticed by it",
    )
    writes: bool = Field(
        default=False,
        exclude_if=lambda writes: not writes,
        description="Its model writes answers piece by piece, as many rows side by side in a replica as its batch "
        "size: each row leaves by itself, its time is that to its first piece, and who hangs up ends it at once. "
        "Its outputs are text BYTES [], finish_reason BYTES [] and usage INT64 [5]",
    )
    encodes: bool = Field(
        default=False,
        exclude_if=lambda encodes: not encodes,
        description="Its model encodes the images of chats: each image of its input images BYTES [-1] is a row of its "
        "own, goes to whichever replica is free, and its embeddings are kept there until the stage that writes pulls "
        "them. Its only output is references BYTES []",
    )
    transfer_seconds: Seconds = Field(
        default=TRANSFER_SECONDS,
        alias="transfer",
        ge=0,
        exclude_if=lambda seconds: seconds == TRANSFER_SECONDS,
        description="Of a stage that encodes: what bringing a chat's embeddings to who writes is planned to take",
    )
    pin: Pin = Pin()

    @property
    def chats(self) -> bool:
        """Whether its replicas take part in chats, and tell what these hold."""
        return self.writes or self.encodes

    @property
    def parts(self) -> bool:
        """Whether the plan chooses if its images are encoded apart: it has variants that read them, and others."""
        return any(variant.whole for variant in self.variants)

    def leaves_out(self, variant: str) -> str:
        """The input that batches of a variant go without; empty where they take all."""
        if not self.parts:
            return ""
        return PULLED if self.variant(variant).whole else SHOWN

    @property
    def ways(self) -> int:
        """How many ways there are to run it: variants × operating points × batch sizes."""
        return len(self.batch_sizes) * sum(len(variant.points) for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """The variant of that name; KeyError names the ones there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(f"stage {self.name} has no variant {name!r}; it has: {', '.join(v.name for v in self.variants)}")

    def reading_less(self, variant: str, point: str, given: Collection[str]) -> OperatingPoint | None:
        """The operating point that reads just what a request with these inputs has for another.

        None where it has all that one reads, and where there is no such point.
        """
        points, every = self.variant(variant), frozenset(each.name for each in self.inputs)
        wanted = points.point(point).carried(self.inputs) or every
        there = wanted & frozenset(given)
        if there == wanted:
            return None
        return next((each for each in points.points if each.carried(self.inputs) == there), None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"stage {self.name}"
        require_unique((variant.name for variant in self.variants), f"{where}: variants")
        require_unique((tensor.name for tensor in self.inputs), f"{where}: inputs")
        require_unique((tensor.name for tensor in self.outputs), f"{where}: outputs")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"{where}: minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}")
        check_counts(self.name, self.outputs)
        self._require_modalities()
        self._require_looks()
        check_confidence_output(self.name, self.certainty, self.outputs)
        self._require_answers()
        self._require_references()
        self._require_parts()
        self._require_chats()
        self._require_pinned()
        return self

    def _require_pinned(self) -> None:
        """What is pinned must be there together: else no way to run the stage is left, and the plan drops all pins."""
        pin, where = self.pin, f"stage {self.name}: pin"
        among = [one for one in self.variants if pin.variant in {None, one.name}]
        if not among:
            known = ", ".join(variant.name for variant in self.variants)
            raise ValueError(f"{where}.variant {pin.variant!r} is not one of its variants: {known}")
        points = {point.name: None for variant in among for point in variant.points}  # in order
        if pin.operating_point is not None and pin.operating_point not in points:
            whose = "its variants" if pin.variant is None else f"variant {pin.variant}"
            known = ", ".join(points)
            raise ValueError(
                f"{where}.operatingPoint {pin.operating_point!r} is no point of {whose}; there are: {known}"
            )
        running = [one for one in among if pin.operating_point in {None, *(point.name for point in one.points)}]
        largest = max(variant.max_batch_size for variant in running)
        if (pin.batch_size or 1) > largest:
            raise ValueError(f"{where}.batchSize {pin.batch_size} is above the maxBatchSize of what may run: {largest}")
        if pin.replicas is not None and not self.min_replicas <= pin.replicas <= self.max_replicas:
            bounds = f"minReplicas {self.min_replicas} and maxReplicas {self.max_replicas}"
            raise ValueError(f"{where}.replicas {pin.replicas} does not lie between {bounds}")

    def _require_answers(self) -> None:
        if not self.writes:
            return
        found = {(output.name, output.datatype, output.shape) for output in self.outputs if output.counted_by is None}
        if found != set(ANSWER):
            right = ", ".join(f"{name} {datatype} {list(shape)}" for name, datatype, shape in ANSWER)
            raise ValueError(f"stage {self.name} writes, so its outputs must be: {right}")
        told = next((read for read in self.inputs if read.name == PULLED and read.source.startswith("request.")), None)
        if told is not None:
            raise ValueError(
                f"stage {self.name}: {PULLED} are addresses that its replicas call, which no caller may choose; "
                f"read them from a stage, not from {told.source}"
            )

    def _require_references(self) -> None:
        if not self.encodes:
            return
        found = [(output.name, output.datatype, output.shape, output.counted_by) for output in self.outputs]
        if found != [(PULLED, "BYTES", (), None)] or self.writes:
            raise ValueError(f"stage {self.name} encodes, so its only output must be: {PULLED} BYTES []")
        if not any(read.name == SHOWN and read.source.startswith("request.") for read in self.inputs):
            raise ValueError(f"stage {self.name} encodes, so it needs an input {SHOWN} from the request")

    def _require_parts(self) -> None:
        if not self.parts:
            return
        read = {each.name for each in self.inputs if each.optional}
        if not self.writes or not {SHOWN, PULLED} <= read:
            raise ValueError(
                f"stage {self.name} has a variant that is whole, so it must say writes: true and have the optional "
                f"inputs {SHOWN}, from the request, and {PULLED}, from a stage that encodes"
            )

    def _require_chats(self) -> None:
        """Who speaks OpenAI is asked for whole chats, and has no other way to run."""
        pulls = any(read.name == PULLED for read in self.inputs)
        for variant in self.variants:
            if variant.container is None or not variant.container.chats:
                continue
            where = f"stage {self.name}: variant {variant.name} has a container that speaks OpenAI"
            if not self.writes or (pulls and not variant.whole):
                raise ValueError(
                    f"{where}, so the stage must say writes: true, and the variant must read images itself"
                )
            if MESSAGES not in {read.name for read in self.inputs}:
                raise ValueError(f"{where}, so the stage needs an input {MESSAGES}")
            if len(variant.operating_points) > 1:
                raise ValueError(f"{where}, which is told of no operating point; leave out operatingPoints")

    def _require_modalities(self) -> None:
        inputs = {tensor.name for tensor in self.inputs}
        for variant in self.variants:
            for point in variant.operating_points:
                unknown = sorted(set(point.modalities) - inputs)
                if unknown:
                    raise ValueError(
                        f"stage {self.name}: operating point {point.name} of variant {variant.name} reads "
                        f"{unknown[0]!r}, which is not one of the stage's inputs: {', '.join(sorted(inputs))}"
                    )

    def _require_looks(self) -> None:
        """A second look needs a certainty to pick rows by, and another point of the same variant."""
        for variant in self.variants:
            known = {point.name for point in variant.operating_points}
            for point in variant.operating_points:
                where = f"stage {self.name}: operating point {point.name} of variant {variant.name}"
                if point.second_looks and self.certainty is None:
                    raise ValueError(f"{where} has secondLooks, but the stage names no output as its certainty")
                for look in point.second_looks:
                    if look.point == point.name or look.point not in known:
                        others = ", ".join(sorted(known - {point.name}))
                        raise ValueError(f"{where} looks again at {look.point!r}; the other points are: {others}")
