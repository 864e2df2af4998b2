"""Stage of a pipeline: a task, its variants, and the sources of its inputs."""

from collections.abc import Collection, Hashable, Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.engines import ENGINES, UNKNOWN_ENGINE
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import Seconds
from trimtab_pipelines.resource import Model, Name, find_named, require_unique
from trimtab_pipelines.tasks import TASK_INPUT
from trimtab_pipelines.tensors import StageOutput, TensorName, check_confidence_output, check_counts
from trimtab_pipelines.variants import Variant

GENERATION_OUTPUTS = (("text", "BYTES", ()), ("finish_reason", "BYTES", ()), ("usage", "INT64", (5,)))
"""Outputs of a generation stage: name, datatype and shape of a row."""
MESSAGES_INPUT = "messages"
"""Input of a generation stage that holds the chat's messages."""
EMBEDDINGS_INPUT = "references"
"""Input of a generation stage with references to embeddings, and the output of an encoder stage."""
IMAGES_INPUT = "images"
"""Input of an encoder stage; each of its elements is a row of its own there."""
CHAT_IMAGE_INDEX = "chat_images"
"""Input of an encoder's replicas for each image, INT64 [2]: the images of its chat, and the image's index."""

TRANSFER_SECONDS = 0.005
"""Default time to transfer a chat's embeddings between replicas."""

Reference = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]+\.(inputs|outputs)\.[A-Za-z_][A-Za-z0-9_.-]*$",
        max_length=201,
        description="request.inputs.TENSOR or STAGE.outputs.TENSOR.",
    ),
]


class StageInput(Model):
    """An input tensor of a stage."""

    name: TensorName
    source: Reference = Field(alias="from")
    optional: bool = False
    """The stage runs without this input if its source is absent."""
    padding: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Value that dimensions of any size are filled with up to one of few sizes, so that rows of different sizes share a
    batch; the model must tell it from content.
    """


class PipelineOutput(Model):
    """A tensor returned to the client."""

    name: TensorName
    source: Reference = Field(alias="from")


class Pin(Model):
    """Fixed choices; the planner keeps them."""

    variant: Name | None = None
    operating_point: Name | None = None
    batch_size: int | None = Field(default=None, ge=1, le=4096)
    replicas: int | None = Field(default=None, ge=1, le=1000)


class Stage(Model):
    """A task and the variants that perform it."""

    name: Name
    inputs: tuple[StageInput, ...] = Field(default=(), min_length=1, max_length=16)
    """If absent, those that the variants' families declare, from the request."""
    outputs: tuple[StageOutput, ...] = Field(default=(), min_length=1, max_length=16)
    """If absent, those that the variants' families declare."""
    variants: tuple[Variant, ...] = Field(min_length=1, max_length=64)
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64), min_length=1, max_length=32
    )
    """Batch sizes that the planner considers."""
    min_replicas: int = Field(default=1, ge=1, le=1000)
    max_replicas: int = Field(default=64, ge=1, le=1000)
    variant_placement: Literal["Shared", "Dedicated"] = "Shared"
    """Shared: a replica loads every variant that requests the same resources, so that a change of variant starts no
    replica. Dedicated: a replica loads one variant.
    """
    retryable: bool = True
    """Whether a batch may be retried on another replica if its replica is lost. Set to false for models with side
    effects; a batch that may have run then fails.
    """
    confidence: TensorName | None = None
    """Output that holds the model's confidence in each row, calibrated as the probability that the row is correct. The
    router escalates low-confidence rows to a more accurate operating point, and detects accuracy drift from it.
    """
    role: Literal["Predict", "Encode", "Generate"] = Field(default="Predict", exclude_if=lambda role: role == "Predict")
    """Predict: tensors in, tensors out. Encode: the model encodes the images of chats. Each image of its input images
    BYTES [-1] is a row of its own and is dispatched to any free replica, which stores the embeddings until the
    generation stage pulls them; its only output is references BYTES []. Generate: the model generates text. batchSize
    is the number of concurrent generations per replica, latency is time to first token, and a client disconnect cancels
    the generation; its outputs are text BYTES [], finish_reason BYTES [] and usage INT64 [5].
    """
    embedding_transfer_seconds: Seconds = Field(
        default=TRANSFER_SECONDS,
        alias="embeddingTransfer",
        ge=0,
        exclude_if=lambda seconds: seconds == TRANSFER_SECONDS,
    )
    """Planned time to transfer a chat's embeddings from an encoder to a generation replica."""
    pin: Pin = Pin()

    def hosting_key(self, variant: Variant) -> Hashable:
        """What variants that one replica loads have in common: the same resources on the same nodes, and pods alike."""
        if self.variant_placement == "Dedicated" or variant.container is not None:
            return variant.name
        nodes = tuple(sorted(variant.node_selector.items())), variant.tolerations, variant.runtime_class_name
        template = variant.pod_template.model_dump_json() if variant.pod_template is not None else ""
        return variant.resources, variant.flavor, nodes, variant.secret_name, template

    @cached_property
    def hosted(self) -> Mapping[Hashable, tuple[Variant, ...]]:
        """Variants that one replica loads, by hosting key."""
        hosted: dict[Hashable, tuple[Variant, ...]] = {}
        for variant in self.variants:
            key = self.hosting_key(variant)
            hosted[key] = (*hosted.get(key, ()), variant)
        return hosted

    def hosted_with(self, variant: str) -> tuple[Variant, ...]:
        """Variants that may serve batches beside this one, itself included, because the same replica loads them.

        Of a stage that serves chats or reads tasks, only itself: a chat stays in the engine of its variant, and
        variants may have different tasks. KeyError lists the known variants.
        """
        own = self.variant(variant)
        return (own,) if self.serves_one_variant else self.hosted[self.hosting_key(own)]

    def max_replicas_of(self, variant: Variant) -> int:
        """Maximum of replicas; of a variant with endpoints, as many as there are."""
        endpoints = variant.container.endpoints if variant.container is not None else ()
        return min(self.max_replicas, len(endpoints) or self.max_replicas)

    @property
    def serves_one_variant(self) -> bool:
        """Whether one variant at a time serves batches: in stages that serve chats or read tasks."""
        return self.serves_chats or any(read.name == TASK_INPUT for read in self.inputs)

    @property
    def mixes_variants(self) -> bool:
        """Whether batches may be served by several variants: a replica hosts them, and no pin selects one."""
        free = self.pin.variant is None and self.pin.operating_point is None
        return free and any(len(self.hosted_with(variant.name)) > 1 for variant in self.variants)

    @property
    def mixes_engine_points(self) -> bool:
        """Whether the chats of a third-party engine may run at several operating points: no pin selects one."""
        engines = (variant for variant in self.variants if variant.container is not None)
        return self.pin.operating_point is None and any(len(engine.operating_points) > 1 for engine in engines)

    @property
    def encodes(self) -> bool:
        return self.role == "Encode"

    @property
    def generates(self) -> bool:
        return self.role == "Generate"

    @property
    def serves_chats(self) -> bool:
        """Whether its replicas take part in chats and expose chat metrics."""
        return self.generates or self.encodes

    @property
    def chooses_encoder_placement(self) -> bool:
        """Whether the plan chooses between a colocated and a disaggregated encoder: it has variants of both kinds."""
        return any(variant.colocated for variant in self.variants)

    @property
    def variants_with_tasks(self) -> tuple[Variant, ...]:
        """Variants that accept tasks at run time: hosted by Trimtab's model servers, which read each row's task."""
        reads_task = any(read.name == TASK_INPUT for read in self.inputs)
        return tuple(variant for variant in self.variants if reads_task and variant.container is None)

    @property
    def class_output(self) -> str | None:
        """The output that responses are compared by: the first integer of a row; None if there is none."""
        integers = (o.name for o in self.outputs if o.datatype.startswith(("INT", "UINT", "BOOL")) and not o.counted_by)
        return next(integers, None)

    def excluded_input(self, variant: str) -> str:
        """The input that batches of a variant leave out; empty if they take all inputs."""
        if not self.chooses_encoder_placement:
            return ""
        return EMBEDDINGS_INPUT if self.variant(variant).colocated else IMAGES_INPUT

    @property
    def option_count(self) -> int:
        """Number of options: variants × operating points × batch sizes."""
        return len(self.batch_sizes) * sum(len(variant.points) for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """Return a variant; KeyError lists the known variants."""
        return find_named(self.variants, name, f"stage {self.name} has no variant")

    def point_for_inputs(self, variant: str, point: str, inputs: Collection[str]) -> OperatingPoint | None:
        """Operating point that reads exactly the given inputs among those that another point reads.

        None if all inputs of that point are given, or if no operating point matches.
        """
        known = self.variant(variant)
        required = known.point(point).batch_inputs(self.inputs) or frozenset(tensor.name for tensor in self.inputs)
        present = required & frozenset(inputs)
        if present == required:
            return None
        return next((other for other in known.points if other.batch_inputs(self.inputs) == present), None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        where = f"stage {self.name}"
        for kind in ("inputs", "outputs"):
            if not getattr(self, kind):
                families = ", ".join(sorted({variant.family or "a container" for variant in self.variants}))
                raise ValueError(f"{where}: {kind} are missing; list them, since {families} does not declare them")
        require_unique((variant.name for variant in self.variants), f"{where}: variants")
        require_unique((tensor.name for tensor in self.inputs), f"{where}: inputs")
        require_unique((tensor.name for tensor in self.outputs), f"{where}: outputs")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"{where}: minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}")
        check_counts(self.name, self.outputs)
        self._require_modalities()
        self._require_valid_escalations()
        check_confidence_output(self.name, self.confidence, self.outputs)
        self._require_generation_outputs()
        self._require_encoder_output()
        self._require_colocated_inputs()
        self._require_openai_containers()
        self._require_equal_adapters()
        self._require_valid_pin()
        return self

    def _require_valid_pin(self) -> None:
        """Require that the pinned fields match at least one option; the planner would drop all pins otherwise."""
        pin, where = self.pin, f"stage {self.name}: pin"
        variants = [variant for variant in self.variants if pin.variant in {None, variant.name}]
        if not variants:
            known = ", ".join(variant.name for variant in self.variants)
            raise ValueError(f"{where}.variant {pin.variant!r} is not one of its variants: {known}")
        points = {point.name: None for variant in variants for point in variant.points}  # in order
        if pin.operating_point is not None and pin.operating_point not in points:
            whose = "its variants" if pin.variant is None else f"variant {pin.variant}"
            known = ", ".join(points)
            raise ValueError(
                f"{where}.operatingPoint {pin.operating_point!r} is not an operating point of {whose}: {known}"
            )
        allowed = [v for v in variants if pin.operating_point in {None, *(point.name for point in v.points)}]
        largest = max(variant.max_batch_size for variant in allowed)
        if (pin.batch_size or 1) > largest:
            raise ValueError(
                f"{where}.batchSize {pin.batch_size} is above the largest maxBatchSize of allowed variants, {largest}"
            )
        if pin.replicas is not None and not self.min_replicas <= pin.replicas <= self.max_replicas:
            bounds = f"minReplicas {self.min_replicas} and maxReplicas {self.max_replicas}"
            raise ValueError(f"{where}.replicas {pin.replicas} must be between {bounds}")

    def _require_generation_outputs(self) -> None:
        if not self.generates:
            return
        outputs = {(output.name, output.datatype, output.shape) for output in self.outputs if output.counted_by is None}
        if outputs != set(GENERATION_OUTPUTS):
            required = ", ".join(f"{name} {datatype} {list(shape)}" for name, datatype, shape in GENERATION_OUTPUTS)
            raise ValueError(f"stage {self.name}: role Generate requires the outputs {required}")
        from_request = next(
            (read for read in self.inputs if read.name == EMBEDDINGS_INPUT and read.source.startswith("request.")), None
        )
        if from_request is not None:
            raise ValueError(
                f"stage {self.name}: {EMBEDDINGS_INPUT} are URLs that replicas call and must not come from clients; "
                f"read them from an encoder stage, not from {from_request.source}"
            )

    def _require_encoder_output(self) -> None:
        if not self.encodes:
            return
        outputs = [(output.name, output.datatype, output.shape, output.counted_by) for output in self.outputs]
        if outputs != [(EMBEDDINGS_INPUT, "BYTES", (), None)]:
            raise ValueError(f"stage {self.name}: role Encode requires the only output {EMBEDDINGS_INPUT} BYTES []")
        if not any(read.name == IMAGES_INPUT and read.source.startswith("request.") for read in self.inputs):
            raise ValueError(f"stage {self.name}: role Encode requires an input {IMAGES_INPUT} from the request")

    def _require_colocated_inputs(self) -> None:
        if not self.chooses_encoder_placement:
            return
        optional = {tensor.name for tensor in self.inputs if tensor.optional}
        if not self.generates or not {IMAGES_INPUT, EMBEDDINGS_INPUT} <= optional:
            raise ValueError(
                f"stage {self.name}: a variant with encoder Colocated requires role Generate and the optional inputs "
                f"{IMAGES_INPUT}, from the request, and {EMBEDDINGS_INPUT}, from an encoder stage"
            )

    @property
    def processor_kwargs(self) -> dict[tuple[str, str], dict[str, bool | int | float | str]]:
        """Options of third-party engines' image processors, by variant and operating point."""
        points = ((variant.name, point) for variant in self.variants for point in variant.points)
        return {(name, point.name): point.mm_processor_kwargs for name, point in points}

    def _require_equal_adapters(self) -> None:
        """Require that each variant serves the same tasks: a change of variant would end a task otherwise."""
        for variant in self.variants:
            if missing := sorted(set().union(*(other.adapters for other in self.variants)) - set(variant.adapters)):
                raise ValueError(
                    f"stage {self.name}: variant {variant.name} has no adapter for task {missing[0]!r}; "
                    "give all variants adapters for the same tasks"
                )

    def _require_openai_containers(self) -> None:
        """Require what a container of protocol OpenAI needs: whole chats, and points that its requests can express."""
        pulls = any(read.name == EMBEDDINGS_INPUT for read in self.inputs)
        for variant in self.variants:
            if not variant.forwards_chats:
                self._require_no_processor_kwargs(variant)
                continue
            where = f"stage {self.name}: variant {variant.name} has a container of protocol OpenAI"
            if not self.generates or (pulls and not variant.colocated):
                raise ValueError(
                    f"{where}, which requires role Generate and a variant with its own encoder (encoder: Colocated)"
                )
            if MESSAGES_INPUT not in {read.name for read in self.inputs}:
                raise ValueError(f"{where}, which requires an input {MESSAGES_INPUT}")
            engine = ENGINES.get((variant.container and variant.container.engine) or "", UNKNOWN_ENGINE)
            known = {"mmProcessorKwargs"} if engine.processor_kwargs else set[str]()
            for point in variant.operating_points:
                if unknown := sorted(point.knobs.keys() - known):
                    settings = ", ".join(sorted(known)) or "none"
                    raise ValueError(
                        f"{where}, whose operating point {point.name} sets {unknown[0]}; supported are: {settings}"
                    )
            if len(variant.operating_points) > 1 and not known:
                raise ValueError(f"{where}, which has one operating point; remove operatingPoints")

    def _require_no_processor_kwargs(self, variant: Variant) -> None:
        if point := next((point for point in variant.points if point.mm_processor_kwargs), None):
            where = f"stage {self.name}: operating point {point.name} of variant {variant.name}"
            raise ValueError(f"{where} sets mmProcessorKwargs, which only a container with engine: vllm reads")

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

    def _require_valid_escalations(self) -> None:
        """An escalation requires a confidence output and another operating point, of any variant."""
        for variant in self.variants:
            for point in variant.points:
                where = f"stage {self.name}: operating point {point.name} of variant {variant.name}"
                if point.escalations and self.confidence is None:
                    raise ValueError(f"{where} has escalations, but the stage has no confidence output")
                for escalation in point.escalations:
                    self._require_target(where, (variant.name, point.name), escalation)

    def _require_target(self, where: str, first: tuple[str, str], escalation: Escalation) -> None:
        target, own = escalation.target(first[0]), first[0]
        allowed = (self.variant(own),) if self.serves_one_variant else self.variants
        hosted = {other.name: other for other in allowed}
        if target[0] not in hosted:
            others = ", ".join(hosted.keys() - {own}) or "none"
            raise ValueError(f"{where} escalates to variant {target[0]!r}; the other variants are: {others}")
        known = {point.name for point in hosted[target[0]].points} - {first[1] if target[0] == own else ""}
        if target[1] not in known:
            whose = "" if target[0] == own else f" of variant {target[0]}"
            raise ValueError(
                f"{where} escalates to {target[1]!r}; the other points{whose} are: {', '.join(sorted(known))}"
            )
