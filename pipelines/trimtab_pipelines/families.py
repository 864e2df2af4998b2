"""Families `hf/TASK`: the tensors and the medium of each task, known without torch, and filled into documents.

A stage of such a family may omit `inputs`, which are then read from the request, `outputs` and `role`. A pipeline may
omit `inputs` that these families read, and `outputs`, which are then those of the stages that no other stage reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from trimtab_pipelines.tensors import Datatype, RequestInput, StageOutput, TensorSpec

Medium = Literal["text", "image", "audio"]
RATE = "rate"
"""Input with the hertz of audio that is sent as samples; by default those of the model."""
ARRAYS: Mapping[Medium, tuple[Datatype, tuple[int, ...]]] = {"image": ("UINT8", (-1, -1, 3)), "audio": ("FP32", (-1,))}
"""Arrays that a stage may read in place of files: RGB by row and column, and samples in -1…1."""
Outputs = Mapping[str, tuple[Datatype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens or seconds of the longest value of an input: the parameter of a variant that states them."""

    parameter: str
    default: float


@dataclass(frozen=True, slots=True)
class TaskTensors:
    """Tensors of a task; each input is a BYTES value per row, of one medium, or what ARRAYS allows in its place."""

    medium: Medium
    inputs: tuple[RequestInput, ...]
    outputs: tuple[StageOutput, ...]
    optional: frozenset[str]
    """Inputs that a stage may have, and outputs that it has only if they are read or its `confidence`."""
    role: Literal["Predict", "Generate"] = "Predict"

    @classmethod
    def of(
        cls,
        medium: Medium,
        inputs: Sequence[str],
        outputs: Outputs,
        counted_by: str | None = None,
        optional: Sequence[str] = (),
    ) -> "TaskTensors":
        return cls(
            medium,
            tuple(RequestInput(name=name, datatype="INT32" if name == RATE else "BYTES") for name in inputs),
            tuple(
                StageOutput(
                    name=name, datatype=datatype, shape=shape, counted_by=None if name == counted_by else counted_by
                )
                for name, (datatype, shape) in outputs.items()
            ),
            frozenset(optional),
        )

    def read_as(self, datatypes: Mapping[str, Datatype]) -> tuple[TensorSpec, ...]:
        """Inputs, as arrays where a stage has these."""
        datatype, shape = ARRAYS.get(self.medium, ("BYTES", ()))
        return tuple(
            TensorSpec(name=each.name, datatype=datatype, shape=shape)
            if each.datatype == "BYTES" and datatypes.get(each.name) == datatype
            else each
            for each in self.inputs
        )


MAX_QUESTION_TOKENS, MAX_SECONDS = 64, 30.0
LIMITS: Mapping[str, Limit] = {
    "text": Limit("max_tokens", inf),
    "question": Limit("max_question_tokens", MAX_QUESTION_TOKENS),
    "audio": Limit("max_seconds", MAX_SECONDS),
}
"""Limits by the input's name; a checkpoint has a limit of tokens of its own."""
_TEXT: Outputs = {"text": ("BYTES", ())}
_LABEL: Outputs = {"label": ("BYTES", ()), "score": ("FP32", ())}
_SPAN: Outputs = {"score": ("FP32", ()), "start": ("INT64", ()), "end": ("INT64", ())}
_EMBEDDING: Outputs = {"embedding": ("FP32", (-1,))}
_ENTITIES: Outputs = {"entities": ("INT64", ()), "label": ("BYTES", ()), "word": ("BYTES", ()), **_SPAN}
_OBJECTS: Outputs = {"objects": ("INT64", ()), **_LABEL, "box": ("FP32", (4,)), "crop": ("BYTES", ())}
HF_FAMILIES: dict[str, TaskTensors] = {
    "hf/text-classification": TaskTensors.of("text", ["text"], _LABEL),
    "hf/token-classification": TaskTensors.of("text", ["text"], _ENTITIES, "entities"),
    "hf/question-answering": TaskTensors.of("text", ["question", "context"], {"answer": ("BYTES", ()), **_SPAN}),
    "hf/summarization": TaskTensors.of("text", ["text"], _TEXT),
    "hf/translation": TaskTensors.of("text", ["text", "language"], _TEXT, optional=["language"]),
    "hf/text-embedding": TaskTensors.of("text", ["text"], _EMBEDDING),
    "hf/speech-recognition": TaskTensors.of(
        "audio", ["audio", RATE], {**_TEXT, "score": ("FP32", ())}, optional=["score", RATE]
    ),
    "hf/image-classification": TaskTensors.of("image", ["image"], _LABEL),
    "hf/object-detection": TaskTensors.of("image", ["image"], _OBJECTS, "objects", optional=["crop"]),
    "hf/zero-shot-image-classification": TaskTensors.of("image", ["image"], _LABEL),
    "hf/image-embedding": TaskTensors.of("image", ["image"], _EMBEDDING),
}
_MESSAGES, _OPTIONS = (
    RequestInput(name=name, datatype="BYTES", optional=name != "messages") for name in ("messages", "options")
)
_IMAGES = RequestInput(name="images", datatype="BYTES", shape=(-1,), optional=True)
_ANSWER = (
    StageOutput(name="text", datatype="BYTES"),
    StageOutput(name="finish_reason", datatype="BYTES"),
    StageOutput(name="usage", datatype="INT64", shape=(5,)),
)
CHAT_TASKS: dict[str, TaskTensors] = {
    "hf/text-generation": TaskTensors("text", (_MESSAGES, _OPTIONS), _ANSWER, frozenset(), "Generate"),
    "hf/image-text-to-text": TaskTensors("text", (_MESSAGES, _IMAGES, _OPTIONS), _ANSWER, frozenset(), "Generate"),
}
"""Tasks of the generation engine, which answers chats."""
Document = Mapping[str, Any]


def fill_tensors(spec: Document) -> Document:
    """A pipeline's specification, as in a document, with the tensors that it omits; unchanged if it is malformed."""
    try:
        references = {read["from"] for reader in (spec, *spec["stages"]) for read in _reads(reader)}
        stages = [_fill_stage(stage, references) for stage in spec["stages"]]
        filled = {"inputs": _request_inputs(stages), "outputs": _results(stages)}
    except (TypeError, LookupError, AttributeError):  # its fields are checked afterwards
        return spec
    return {**{name: tensors for name, tensors in filled.items() if tensors}, **spec, "stages": stages}


def _reads(reader: Document) -> Sequence[Document]:
    """Inputs of a stage, or outputs of a pipeline."""
    reads: Sequence[Document] = reader.get("outputs" if "stages" in reader else "inputs", [])
    return reads


def _tensors(stage: Document) -> TaskTensors | None:
    """The tensors that all families of a stage declare; None if they differ or declare none."""
    declared = [(HF_FAMILIES | CHAT_TASKS).get(variant.get("family")) for variant in stage["variants"]]
    return declared[0] if all(tensors == declared[0] for tensors in declared) else None


def _fill_stage(stage: Document, references: set[str]) -> Document:
    declared = _tensors(stage)
    if declared is None:
        return stage
    inputs = [
        {"name": tensor.name, "from": f"request.inputs.{tensor.name}"} | ({"optional": True} if tensor.optional else {})
        for tensor in declared.inputs
        if tensor.name not in declared.optional
    ]
    outputs = [
        output.model_dump(exclude_defaults=True)
        for output in declared.outputs
        if output.name not in declared.optional
        or output.name == stage.get("confidence")
        or f"{stage['name']}.outputs.{output.name}" in references
    ]
    role = {} if declared.role == "Predict" else {"role": declared.role}
    return {"inputs": inputs, "outputs": outputs, **role, **stage}


def _request_inputs(stages: Sequence[Document]) -> list[Document]:
    """The request's inputs that stages with declared tensors read."""
    found: dict[str, Document] = {}
    for stage in stages:
        declared = _tensors(stage)
        by_name = {tensor.name: tensor for tensor in declared.inputs} if declared else {}
        for read in stage["inputs"]:
            owner, _, name = read["from"].partition(".inputs.")
            if owner == "request" and read["name"] in by_name:
                found.setdefault(name, by_name[read["name"]].model_dump(exclude_defaults=True) | {"name": name})
    return [*found.values()]


def _results(stages: Sequence[Document]) -> list[Document]:
    """All outputs of the stages that no stage reads."""
    read = {each["from"].partition(".")[0] for stage in stages for each in stage["inputs"]}
    last = [stage for stage in stages if stage["name"] not in read]
    return [
        {"name": output["name"], "from": f"{stage['name']}.outputs.{output['name']}"}
        for stage in last
        for output in stage["outputs"]
    ]
