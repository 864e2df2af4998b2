"""What else the times of a stage that writes depend on: whether its chats show images, and where an answer ends. Pure.

A plan needs the time until an answer begins, which is what is promised, beside that of the whole answer; and chats show
another number of images each hour. Both are measured at the ends of a line: no images and one, one token and all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, Stage
from trimtab_protocol import Tensor

KINDS: Final = 4
"""With and without images, each to the first piece and to the end."""
LENGTHS: Final = (1, 4, 16, 64, 256)
"""How many times as long prompts are made, to measure how long they take to be read; as far as a model takes them."""
MESSAGES, OPTIONS, USAGE, PROMPT, COMPLETION = "messages", "options", "usage", 0, 1
Rows = Mapping[str, NDArray[Any]]


def may_differ(stage: Stage, rows: Rows) -> bool:
    """Whether chats of a stage show images, and may be told where to end."""
    return (
        stage.generates and {MESSAGES, OPTIONS} <= rows.keys() and bool({IMAGES_INPUT, EMBEDDINGS_INPUT} & rows.keys())
    )


def textual(rows: Rows) -> dict[str, NDArray[Any]]:
    """The same chats without their images."""
    kept = {name: array for name, array in rows.items() if name not in {IMAGES_INPUT, EMBEDDINGS_INPUT}}
    return kept | {MESSAGES: _each(rows[MESSAGES], _without_images)}


def first_token_only(rows: Rows) -> dict[str, NDArray[Any]]:
    """The same chats, of which the first token is the last."""
    return {**rows, OPTIONS: _each(rows[OPTIONS], lambda options: options | {"max_tokens": 1})}


def with_longer_prompt(rows: Rows, times: int) -> dict[str, NDArray[Any]]:
    """The same chats, of which each says what it says so many times."""
    return {**rows, MESSAGES: _each(rows[MESSAGES], lambda messages: [_said_again(one, times) for one in messages])}


def without_shared_prefix(batch: tuple[Tensor, ...], number: int) -> tuple[Tensor, ...]:
    """A batch of a tenant whom nobody has seen, where it tells options: nothing that replicas keep may be reused."""
    return tuple(
        replace(tensor, array=_each(tensor.array, lambda options: options | {"tenant": f"stranger-{number}"}))
        if tensor.name == OPTIONS and tensor.datatype == "BYTES" and tensor.array.ndim == 1
        else tensor
        for tensor in batch
    )


def mean_tokens(outputs: Sequence[Tensor]) -> float:
    """Tokens of an answer, on average, at least one."""
    return max(_mean(outputs, COMPLETION), 1.0)


def mean_prompt_tokens(outputs: Sequence[Tensor]) -> float:
    """Tokens of a prompt, on average: of words and, where they join the prompt, of images."""
    return max(_mean(outputs, PROMPT), 1.0)


def _mean(outputs: Sequence[Tensor], of: int) -> float:
    usage = next(tensor.array for tensor in outputs if tensor.name == USAGE)
    return float(np.mean(usage[:, of]))


def _said_again(message: Any, times: int) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": " ".join([content] * times)}
    said = [part | {"text": " ".join([part["text"]] * times)} if "text" in part else part for part in content]
    return message | {"content": said}


def _without_images(messages: Any) -> Any:
    return [message | {"content": _text(message["content"])} for message in messages]


def _text(content: Any) -> Any:
    return content if isinstance(content, str) else [part for part in content if part["type"] != "image"]


def _each(array: NDArray[Any], change: Any) -> NDArray[Any]:
    changed = np.empty(len(array), dtype=object)
    changed[:] = [json.dumps(change(json.loads(one))).encode() for one in array]
    return changed
