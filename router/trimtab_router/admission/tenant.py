"""Tenant of each chat: the router writes it into the chat's options, and overrides any tenant or urgency given there.

Prefix caches and embeddings are shared within a tenant only: a client that could name another tenant could probe for
its prompts.
"""

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_protocol.chat.internal_wire import OPTIONS, bytes_tensor, options_with_tenant
from trimtab_protocol.messages import TensorHeader
from trimtab_router.refusal import invalid
from trimtab_router.request import Call

MAX_OPTIONS_BYTES = 2**16
"""Maximum bytes of options in one row. They are parsed on the event loop."""
MAX_INLINE_ROWS = 128
"""More rows take about a millisecond, and are rewritten in a thread."""


def options_inputs(spec: InferencePipelineSpec) -> tuple[str, ...]:
    """Inputs of a pipeline's requests that hold chat options. Empty if the pipeline serves no chats."""
    declared = {tensor.name for tensor in spec.inputs if (tensor.datatype, tuple(tensor.shape)) == ("BYTES", ())}
    chat_stages = (stage for stage in spec.stages if stage.generates or stage.encodes)
    read = (split_reference(read.source) for stage in chat_stages for read in stage.inputs if read.name == OPTIONS)
    return tuple(sorted({name for owner, name in read if owner == REQUEST and name in declared}))


def is_slow_to_rewrite(names: tuple[str, ...], inputs: Iterable[TensorHeader]) -> bool:
    """Whether rewriting this many rows of options would delay other requests."""
    return any(tensor.name in names and prod(tensor.shape) > MAX_INLINE_ROWS for tensor in inputs)


def set_tenant(call: Call, names: tuple[str, ...], client: str) -> None:
    """Write the tenant into each chat's row. Raises Refusal for options that are no JSON object or too long."""
    inputs = dict(call.inputs)
    rows = len(next(iter(inputs.values())))
    for name in names:
        rows_of_input = [bytes(row) for row in inputs[name]] if name in inputs else [b"{}"] * rows
        options_by_row = {row: _parse_options(name, row) for row in set(rows_of_input)}
        rewritten = {
            row: json.dumps(options_with_tenant(options, tenant=client)).encode()
            for row, options in options_by_row.items()
        }
        inputs[name] = bytes_tensor([rewritten[row] for row in rows_of_input])
    call.inputs = inputs


def _parse_options(name: str, text: bytes) -> Mapping[str, Any]:
    if len(text) > MAX_OPTIONS_BYTES:
        raise invalid(f"input {name!r}: {len(text)} bytes in a row; send at most {MAX_OPTIONS_BYTES}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"input {name!r}: a row is not JSON; send an object, for example {{}}") from error
    if not isinstance(options, dict):
        raise invalid(f"input {name!r}: a row is JSON, but not an object; send one, for example {{}}")
    return options
