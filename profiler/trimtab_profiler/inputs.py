"""What is fed to a variant while it is measured: real rows where there are some, else random ones of the right shape.

Rows are kept by the reference that stages read them by (`request.inputs.image`, `locate.outputs.crops`). A stage behind
another one gets what that stage really answered; only where it answered nothing, random rows stand in.
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

PICTURE_PX, ANSWERED_TOKENS = 448, 32
"""Of a chat that nothing else is known of."""
Array = NDArray[Any]
Rows = Mapping[str, Array]


def request_rows(pipeline: InferencePipeline, count: int, seed: int = 0) -> dict[str, Array]:
    """Make `count` rows of every request input: what the pipeline's annotation says, else random.

    Raises:
        ValueError: unknown payloads, or a default dimension that is no positive integer.
    """
    kind = synthetic_inputs.payloads_of(pipeline)
    size = synthetic_inputs.default_dimension(pipeline)
    rows = {f"{REQUEST}.inputs.{spec.name}": random_rows(spec, count, size, seed) for spec in pipeline.spec.inputs}
    rows |= _chats(pipeline, count, seed)
    if kind == "digits":
        from trimtab_training.digits.page_generator import PageSource  # noqa: PLC0415 - slow to import

        pages = PageSource(split="held-out", seed=seed).pages(0, count)
        rows[f"{REQUEST}.inputs.image"] = np.stack([page.pixels for page in pages])
    elif kind.partition(":")[0] == synthetic_inputs.DIGITS_AV:
        from trimtab_training.digits_av.dataset import ItemSource  # noqa: PLC0415 - slow to import

        items = ItemSource("held-out", seed).items(0, count)
        rows |= {f"{REQUEST}.inputs.{name}": array for name, array in items.inputs().items()}
    elif kind.partition(":")[0] == synthetic_inputs.LMM_DIGITS:
        from trimtab_training.lmm_digits.chat_samples import ChatSource  # noqa: PLC0415 - slow to import

        source = ChatSource(seed, pages=(1, 1))
        chats = [source.chat(index) for index in range(count)]
        rows |= {
            f"{REQUEST}.inputs.messages": _bytes([chat.messages for chat in chats]),
            f"{REQUEST}.inputs.images": _bytes([chat.images[0] for chat in chats])[:, None],
            f"{REQUEST}.inputs.options": _bytes([b"{}"] * count),
        }
    elif kind != "random":
        laws = synthetic_inputs.parse_distributions(kind, pipeline.spec.inputs)
        drawn = synthetic_inputs.draw_inputs(laws, pipeline.spec.inputs, count, (seed,))
        rows |= {f"{REQUEST}.inputs.{name}": array for name, array in drawn.items()}
    return rows


def _chats(pipeline: InferencePipeline, count: int, seed: int) -> dict[str, Array]:
    """Questions about pictures of noise, for the inputs of a pipeline that takes chats; of another none."""
    shapes = {(spec.name, spec.datatype): spec.shape for spec in pipeline.spec.inputs}
    if shapes.get(("messages", "BYTES")) != ():
        return {}
    shown = [{"type": "image"}] if shapes.get(("images", "BYTES")) == (-1,) else []
    content = [*shown, {"type": "text", "text": "What does it show?"}]
    rows = {"messages": _bytes([json.dumps([{"role": "user", "content": content}]).encode()] * count)}
    if shown:
        rows["images"] = _bytes([_noise(seed + number) for number in range(count)])[:, None]
    if shapes.get(("options", "BYTES")) == ():
        rows["options"] = _bytes([json.dumps({"max_tokens": ANSWERED_TOKENS}).encode()] * count)
    return {f"{REQUEST}.inputs.{name}": array for name, array in rows.items()}


def _noise(seed: int) -> bytes:
    from PIL import Image  # noqa: PLC0415 - where models see, it is there

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(PICTURE_PX, PICTURE_PX, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def stage_rows(pipeline: InferencePipeline, stage: Stage, known: Rows, count: int) -> dict[str, Array]:
    """Gather the rows of each input of a stage, [≥ 1, …] by input name; random where none are known."""
    gathered = {}
    for read in stage.inputs:
        rows = known.get(read.source)
        if rows is None or not len(rows):
            rows = random_rows(
                source_of(pipeline.spec, read.source), count, synthetic_inputs.default_dimension(pipeline)
            )
        gathered[read.name] = rows
    return gathered


def batch(rows: Rows, size: int, offset: int, datatypes: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Cut a batch of `size` rows that begins at row `offset`, going round where rows are fewer."""
    tensors = []
    for name, array in rows.items():
        index = (np.arange(size) + offset) % len(array)
        tensors.append(Tensor(name, datatypes[name], np.ascontiguousarray(array[index])))
    return tuple(tensors)


def datatypes(pipeline: InferencePipeline, stage: Stage) -> dict[str, str]:
    """The datatype of each of a stage's inputs."""
    return {read.name: source_of(pipeline.spec, read.source).datatype for read in stage.inputs}


def captured(stage: Stage, answers: Iterable[Sequence[Tensor]]) -> dict[str, Array]:
    """Join the outputs of several batches, by the references that later stages read them by."""
    pieces: dict[str, list[Array]] = {}
    for answer in answers:
        for tensor in answer:
            own = _blank(tensor.array) if stage.encodes else tensor.array
            pieces.setdefault(f"{stage.name}.outputs.{tensor.name}", []).append(own)
    return {reference: np.concatenate(arrays) for reference, arrays in pieces.items()}


def random_rows(spec: TensorSpec, count: int, any_size: int, seed: int = 0) -> Array:
    """Draw rows of a tensor: floats uniform in 0…1, integers over 0…127, BYTES of 32 characters."""
    random = np.random.default_rng([seed, *spec.name.encode()])
    shape = (count, *(any_size if size == -1 else size for size in spec.shape))
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "O":
        texts = np.array([random.bytes(16).hex().encode() for _ in range(int(np.prod(shape)))], dtype=object)
        return texts.reshape(shape)
    if dtype.kind == "f":
        return random.random(shape, dtype=np.float32).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else 128, size=shape).astype(dtype)


def _blank(references: Array) -> Array:
    """Images of as many rows, which show nothing: what was encoded is gone by the time it would be pulled."""
    return _bytes([dump_refs([blank_image(parse_encoded_image(one))]) for one in references])


def _bytes(elements: Sequence[bytes]) -> Array:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
