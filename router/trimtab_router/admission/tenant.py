"""Says whose each chat is, and lets none say how urgent it is. Pure.

What is made of a chat is shared within one client: who could name another would learn what that one asked.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_protocol import Tensor
from trimtab_protocol.chat.internal_wire import OPTIONS, options_with_tenant, texts
from trimtab_protocol.messages import TensorHeader
from trimtab_router.admission.validation import ValidatedRequest
from trimtab_router.refusal import invalid

MOST_OPTIONS_BYTES = 2**16
"""Of one row: what is read here is read on the way of everybody."""
MOST_ROWS_AT_ONCE = 128
"""More take about a millisecond, and a thread."""


def options_inputs(spec: InferencePipelineSpec) -> tuple[str, ...]:
    """The inputs of a pipeline's requests that its stages read as options of chats; none where it answers no chats."""
    declared = {each.name for each in spec.inputs if (each.datatype, tuple(each.shape)) == ("BYTES", ())}
    chatting = (stage for stage in spec.stages if stage.generates or stage.encodes)
    read = (split_reference(read.source) for stage in chatting for read in stage.inputs if read.name == OPTIONS)
    return tuple(sorted({name for owner, name in read if owner == REQUEST and name in declared}))


def is_slow_to_rewrite(names: tuple[str, ...], inputs: Iterable[TensorHeader]) -> bool:
    """Whether so many rows of options come that others would feel it where they are read."""
    return any(each.name in names and prod(each.shape) > MOST_ROWS_AT_ONCE for each in inputs)


def with_tenant(admitted: ValidatedRequest, names: tuple[str, ...], *, client: str) -> ValidatedRequest:
    """Say in each row of these inputs whose it is, whatever it says itself; add those that are absent.

    How urgent it is nobody says but by a deadline: replicas are told of that as each row leaves for them.

    Args:
        admitted: with a row of each input for each of its chats.
        names: as `options_inputs` gives them.
        client: whose the chats are; empty for nobody in particular.

    Raises:
        Refusal: INVALID_ARGUMENT for options that are no JSON object or too long.
    """
    if not names:
        return admitted
    rows = len(next(iter(admitted.inputs.values())))
    inputs = dict(admitted.inputs)
    for name in names:
        given = [bytes(each) for each in inputs[name]] if name in inputs else [b"{}"] * rows
        told = {each: _read(name, each) for each in set(given)}
        ours = {
            each: json.dumps(options_with_tenant(options, tenant=client)).encode() for each, options in told.items()
        }
        inputs[name] = texts([ours[each] for each in given])
    kept = tuple(tensor for tensor in admitted.request.inputs if tensor.name not in names)
    added = tuple(Tensor(name, "BYTES", inputs[name]) for name in names)
    return replace(admitted, request=replace(admitted.request, inputs=kept + added), inputs=inputs)


def _read(name: str, text: bytes) -> Mapping[str, Any]:
    if len(text) > MOST_OPTIONS_BYTES:
        raise invalid(f"input {name!r}: {len(text)} bytes in a row; send at most {MOST_OPTIONS_BYTES}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"input {name!r}: a row is no JSON; send an object, as {{}}") from error
    if not isinstance(options, dict):
        raise invalid(f"input {name!r}: a row is JSON, but no object; send one, as {{}}")
    return options
