"""Input rows of measurements: the pipeline's payloads, outputs of earlier stages, else random rows of the right shape.

Rows are keyed by the reference that stages read (`request.inputs.image`, `locate.outputs.crops`).
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines import synthetic_inputs
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import DTYPES, Tensor
from trimtab_protocol.chat.embedding_refs import blank_image, dump_refs, parse_encoded_image
from trimtab_protocol.chat.internal_wire import bytes_tensor
from trimtab_protocol.tensors import BYTES

PICTURE_PX, ANSWER_TOKENS = 448, 32
"""Defaults for chats without payloads."""
Array = NDArray[Any]
Rows = Mapping[str, Array]


def request_rows(pipeline: InferencePipeline, count: int, seed: int = 0) -> dict[str, Array]:
    """`count` rows of each request input, random unless an annotation names payloads; ValueError if invalid."""
    kind = synthetic_inputs.payloads_of(pipeline)
    size = synthetic_inputs.default_dimension(pipeline)
    laws = synthetic_inputs.input_laws(pipeline)
    rows = {
        f"{REQUEST}.inputs.{spec.name}": random_rows(spec, count, size, seed, laws.get(spec.name))
        for spec in pipeline.spec.inputs
    }
    rows |= _chat_rows(pipeline, count, seed)
    if kind == "digits":
        from trimtab_training.digits.page_generator import PageSource  # noqa: PLC0415 - slow to import

        pages = PageSource(split="held-out", seed=seed).pages(0, count)
        rows[f"{REQUEST}.inputs.image"] = np.stack([page.pixels for page in pages])
    elif kind.partition(":")[0] == synthetic_inputs.DIGITS_AV:
        from trimtab_training.digits_av.dataset import ItemSource  # noqa: PLC0415 - slow to import

        items = ItemSource("held-out", seed).items(0, count)
        rows |= {f"{REQUEST}.inputs.{name}": array for name, array in items.inputs().items()}
    elif kind.partition(":")[0] == synthetic_inputs.LMM_DIGITS:
        from trimtab_training.lmm_digits.questions import ChatSource  # noqa: PLC0415 - slow to import

        source = ChatSource(seed, pages=(1, 1))
        chats = [source.chat(index) for index in range(count)]
        rows |= {
            f"{REQUEST}.inputs.messages": bytes_tensor([chat.messages for chat in chats]),
            f"{REQUEST}.inputs.images": bytes_tensor([chat.images[0] for chat in chats])[:, None],
            f"{REQUEST}.inputs.options": bytes_tensor([b"{}"] * count),
        }
    elif kind == synthetic_inputs.SPOKEN_SUMS:
        from trimtab_training.spoken_sums.dataset import SumSource  # noqa: PLC0415 - slow to import

        sums = SumSource("held-out", seed)
        rows[f"{REQUEST}.inputs.audio"] = bytes_tensor([sums.spoken(index).wav() for index in range(count)])
    return rows


def _chat_rows(pipeline: InferencePipeline, count: int, seed: int) -> dict[str, Array]:
    """Questions about noise images for pipelines that take chats, else nothing."""
    shapes = {(spec.name, spec.datatype): spec.shape for spec in pipeline.spec.inputs}
    if shapes.get(("messages", "BYTES")) != ():
        return {}
    shown = [{"type": "image"}] if shapes.get(("images", "BYTES")) == (-1,) else []
    content = [*shown, {"type": "text", "text": "What does it show?"}]
    rows = {"messages": bytes_tensor([json.dumps([{"role": "user", "content": content}]).encode()] * count)}
    if shown:
        rows["images"] = bytes_tensor([_noise(seed + number) for number in range(count)])[:, None]
    if shapes.get(("options", "BYTES")) == ():
        rows["options"] = bytes_tensor([json.dumps({"max_tokens": ANSWER_TOKENS}).encode()] * count)
    return {f"{REQUEST}.inputs.{name}": array for name, array in rows.items()}


def _noise(seed: int) -> bytes:
    from PIL import Image  # noqa: PLC0415 - optional extra

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(PICTURE_PX, PICTURE_PX, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def stage_rows(pipeline: InferencePipeline, stage: Stage, known: Rows, count: int) -> dict[str, Array]:
    """Rows of each input of a stage, [≥ 1, …]; random if unknown. Samples may lack optional inputs of the request."""
    gathered = {}
    for stage_input in stage.inputs:
        rows = known.get(stage_input.source)
        if rows is None and known and stage_input.optional and stage_input.source.startswith(f"{REQUEST}."):
            continue
        if rows is None or not len(rows):
            tensor = source_of(pipeline.spec, stage_input.source)
            law = synthetic_inputs.input_law(pipeline, stage_input.source) if tensor.datatype == BYTES else None
            rows = random_rows(tensor, count, synthetic_inputs.default_dimension(pipeline), law=law)
        gathered[stage_input.name] = rows
    return gathered


def batch(rows: Rows, size: int, offset: int, datatypes: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Take a batch of `size` rows from row `offset`, cyclically."""
    tensors = []
    for name, array in rows.items():
        index = (np.arange(size) + offset) % len(array)
        tensors.append(Tensor(name, datatypes[name], np.ascontiguousarray(array[index])))
    return tuple(tensors)


def datatypes(pipeline: InferencePipeline, stage: Stage) -> dict[str, str]:
    return {each.name: source_of(pipeline.spec, each.source).datatype for each in stage.inputs}


def concatenate_outputs(stage: Stage, answers: Iterable[Sequence[Tensor]]) -> dict[str, Array]:
    """Concatenate the outputs of several batches, keyed by the references of later stages."""
    parts: dict[str, list[Array]] = {}
    for answer in answers:
        for tensor in answer:
            array = blank_references(tensor.array) if stage.encodes else tensor.array
            parts.setdefault(f"{stage.name}.outputs.{tensor.name}", []).append(array)
    return {reference: np.concatenate(arrays) for reference, arrays in parts.items()}


def random_rows(
    spec: TensorSpec, count: int, any_size: int, seed: int = 0, law: synthetic_inputs.InputLaw | None = None
) -> Array:
    """Draw rows: by the law, which BYTES need, else floats in 0…1, integers in 0…127, masks of ones, UINT8 in 0…255."""
    random = np.random.default_rng([seed, *spec.name.encode()])
    shape = (count, *(any_size if size == -1 else size for size in spec.shape))
    dtype = DTYPES[spec.datatype]
    if law is not None:
        return law.draw(spec, count, any_size, random)
    if dtype.kind == "f":
        return random.random(shape, dtype=np.float32).astype(dtype)
    if spec.name.endswith("mask"):
        return np.ones(shape, dtype)
    end = 2 if dtype.kind == "b" else 256 if dtype == np.uint8 and len(spec.shape) > 1 else 128
    return random.integers(0, end, size=shape).astype(dtype)


def blank_references(references: Array) -> Array:
    """References to blank images of the same size, since encoded images have expired when they would be pulled."""
    return bytes_tensor([dump_refs([blank_image(parse_encoded_image(one))]) for one in references])
