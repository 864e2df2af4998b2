"""Rows of chats for the profile of a generation stage: with and without images, first token only, longer prompts.

A plan needs the time to first token besides the time of the whole answer, and the number of images per chat changes
with the load. Both are measured at two ends and interpolated: no image and one, one token and all.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, Stage
from trimtab_protocol import Tensor

LENGTHS: Final = (1, 4, 16, 64, 256)
"""Factors by which prompts are lengthened to measure prefill time."""
MESSAGES, OPTIONS, USAGE, PROMPT, COMPLETION = "messages", "options", "usage", 0, 1
Rows = Mapping[str, NDArray[Any]]


def needs_chat_profile(stage: Stage, rows: Rows) -> bool:
    """Whether a stage generates from chats with options."""
    return stage.generates and {MESSAGES, OPTIONS} <= rows.keys()


def have_images(rows: Rows) -> bool:
    return bool({IMAGES_INPUT, EMBEDDINGS_INPUT} & rows.keys())


def measured_kinds(rows: Rows) -> int:
    """Chats to the first token and to the end, each without images and, if a stage takes them, with images."""
    return 4 if have_images(rows) else 2


def without_images(rows: Rows) -> dict[str, NDArray[Any]]:
    text_rows = {name: array for name, array in rows.items() if name not in {IMAGES_INPUT, EMBEDDINGS_INPUT}}
    return text_rows | {MESSAGES: _map_json(rows[MESSAGES], _without_images)}


def first_token_only(rows: Rows) -> dict[str, NDArray[Any]]:
    """Chats with `max_tokens` 1."""
    return {**rows, OPTIONS: _map_json(rows[OPTIONS], lambda options: options | {"max_tokens": 1})}


def with_longer_prompt(rows: Rows, times: int) -> dict[str, NDArray[Any]]:
    return {
        **rows,
        MESSAGES: _map_json(rows[MESSAGES], lambda messages: [_repeat_text(message, times) for message in messages]),
    }


def mean_tokens(outputs: Sequence[Tensor]) -> tuple[float, float]:
    """Mean tokens of a prompt, its images included, and of an answer; each at least one."""
    usage = next(tensor.array for tensor in outputs if tensor.name == USAGE)
    prompt, answer = np.maximum(usage[:, [PROMPT, COMPLETION]].mean(axis=0), 1.0).tolist()
    return prompt, answer


def _repeat_text(message: Any, times: int) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": " ".join([content] * times)}
    repeated = [part | {"text": " ".join([part["text"]] * times)} if "text" in part else part for part in content]
    return message | {"content": repeated}


def _without_images(messages: Any) -> Any:
    return [
        message | {"content": [part for part in message["content"] if part["type"] != "image"]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _map_json(array: NDArray[Any], change: Any) -> NDArray[Any]:
    changed = np.empty(len(array), dtype=object)
    changed[:] = [json.dumps(change(json.loads(element))).encode() for element in array]
    return changed
