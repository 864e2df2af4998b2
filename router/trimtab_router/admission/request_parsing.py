"""Parsing of a request into a `Call`: names, datatypes, shapes, finite numbers, request options and tenants of chats.

A client's error is found here, before its rows share a batch with those of others. The router overrides any tenant that
a chat names: prefix caches and embeddings are shared within a tenant, and another one could probe them for prompts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.tensors import RequestInput
from trimtab_protocol import InferRequest, PendingRequest
from trimtab_protocol.chat.internal_wire import IMAGES, bytes_tensor, options_with_tenant
from trimtab_protocol.extensions import TASK
from trimtab_protocol.messages import MAX_SHARED_HEADERS, TensorHeader
from trimtab_protocol.tensors import BYTES, TensorLike
from trimtab_router.execution.task_registry import missing_input, task_inputs
from trimtab_router.limits import JSON_MULTIPLE
from trimtab_router.refusal import Refusal, invalid, unknown_model
from trimtab_router.request import Call, RequestOptions, parse_request_options

VERSION = "1"
BYTES_ELEMENT_BYTES = 64
_UNSUPPORTED = {
    "shared_memory_region": "shared memory is not supported; leave it out, and the response contains the values",
    "classification": "classification (class_count) is not supported; leave it out, and rank the values yourself",
}
"""Unsupported parameters of a requested output, with the remedy. They would change where the values are returned."""
_STATEFUL = ("sequence_id", "sequence_start", "sequence_end")
"""Request parameters that ask for state between requests. 0 and false ask for none."""


_all = np.logical_and.reduce  # without the call between it and `np.all`


class RequestParser:
    """Parser of one pipeline's requests. Each header that requests share is validated once."""

    def __init__(self, pipeline: str, spec: InferencePipelineSpec) -> None:
        self._pipeline = pipeline
        self._spec = spec
        self._validated: dict[int, tuple[InferRequest, tuple[str, ...], RequestOptions]] = {}
        """By the identity of a request, which the entry keeps alive."""

    def parse(self, pending: PendingRequest) -> Call:
        """Decode and validate a request.

        Raises Refusal, or ProtocolError for values that contradict their description.
        """
        request = pending.request
        known = self._validated.get(id(request)) if pending.shared else None
        if known is None:
            known = request, *validate_header(self._pipeline, self._spec, request, pending.inputs)
            if pending.shared:
                if len(self._validated) >= MAX_SHARED_HEADERS:
                    self._validated.clear()
                self._validated[id(request)] = known
        inputs = {}
        for decoder in pending.decoders:
            tensor = decoder()
            if tensor.datatype.startswith("FP") and not _all(np.isfinite(tensor.array), axis=None):
                raise invalid(f"input {tensor.name!r} holds NaN or an infinity; every number must be finite")
            inputs[tensor.name] = tensor.array
        images = inputs.get(IMAGES)
        per_chat = images.shape[1] if images is not None and images.ndim > 1 else 0
        return Call(request, inputs, known[1], known[2], per_chat)


def parse_request(pipeline: str, spec: InferencePipelineSpec, pending: PendingRequest) -> Call:
    return RequestParser(pipeline, spec).parse(pending)


def decoding_bytes(pending: PendingRequest, received_bytes: int) -> int:
    """Memory that decoding needs in addition to the bytes received."""
    strings = [prod(tensor.shape) for tensor in pending.inputs if tensor.datatype == BYTES]
    string_bytes = 2 * received_bytes + BYTES_ELEMENT_BYTES * sum(strings) if strings else 0
    return (JSON_MULTIPLE - 1) * pending.written_bytes + string_bytes


def decoded_bytes(call: Call) -> int:
    """Memory of the decoded tensors that is not shared with the bytes received."""
    total = 0
    for array in call.inputs.values():
        if array.dtype.hasobject:
            total += BYTES_ELEMENT_BYTES * array.size + sum(map(len, array.reshape(-1)))
        elif array.flags.writeable:  # arrays decoded in place are read-only
            total += array.nbytes
    return total


def validate_header(
    pipeline: str, spec: InferencePipelineSpec, request: InferRequest, inputs: Sequence[TensorLike]
) -> tuple[tuple[str, ...], RequestOptions]:
    """Return the requested outputs and the options of a request whose values are still unread. Raises Refusal."""
    check_model(pipeline, request.model_name, request.model_version)
    for name in _STATEFUL:
        if request.parameters.get(name):
            raise invalid(f"parameter {name!r}: sequences are not supported; leave it out")
    declared_inputs = {declared.name: declared for declared in spec.inputs}
    for tensor in inputs:
        if tensor.name not in declared_inputs:
            raise invalid(f"unknown input {tensor.name!r}; {pipeline} takes: {', '.join(declared_inputs)}")
    tensors = {tensor.name: tensor for tensor in inputs}
    for declared in spec.inputs:
        if declared.name in tensors:
            _check_tensor(declared, tensors[declared.name])
        elif not declared.optional and not (TASK in request.parameters and declared.name in task_inputs(spec)):
            raise missing_input(pipeline, declared.name)
    _check_rows(pipeline, spec, inputs)
    return _requested_outputs(pipeline, spec, request), parse_request_options(request.parameters)


def check_model(pipeline: str, name: str, version: str) -> None:
    """Raise NOT_FOUND unless name and version are the pipeline's. An empty version is accepted."""
    if name != pipeline:
        raise unknown_model(name, pipeline)
    if version not in {"", VERSION}:
        raise Refusal("UnknownVersion", f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


def _check_tensor(declared: RequestInput, tensor: TensorLike) -> None:
    if tensor.datatype != declared.datatype:
        raise invalid(f"input {tensor.name!r} is {tensor.datatype}; it must be {declared.datatype}")
    shape = tensor.shape
    if not declared.fits(shape):
        right = ", ".join(["rows", *(str(size) if size >= 0 else "any" for size in declared.shape)])
        raise invalid(f"input {tensor.name!r} has shape {list(shape)}; it must be [{right}]")
    if not shape[0]:
        raise invalid(f"input {tensor.name!r} has no rows; its first dimension must be at least 1")


def _check_rows(pipeline: str, spec: InferencePipelineSpec, tensors: Sequence[TensorLike]) -> None:
    if not tensors:
        raise invalid(f"the request has no inputs; {pipeline} needs at least one tensor")
    rows = {tensor.name: tensor.shape[0] for tensor in tensors}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise invalid(f"the inputs must have the same number of rows, but {counts}")
    count = next(iter(rows.values()))
    if count > spec.queue.max_rows:
        raise invalid(f"{count} rows in one request; send at most {spec.queue.max_rows}")


def _requested_outputs(pipeline: str, spec: InferencePipelineSpec, request: InferRequest) -> tuple[str, ...]:
    declared = tuple(output.name for output in spec.outputs)
    if not request.requested_outputs:
        return declared
    for output in request.requested_outputs:
        if output.name not in declared:
            raise invalid(f"unknown output {output.name!r}; {pipeline} has: {', '.join(declared)}")
        for parameter, remedy in _UNSUPPORTED.items():
            if parameter in output.parameters:
                raise invalid(f"output {output.name!r}: {remedy}")
    # The requested outputs are a cache key: distinct names bound its length.
    outputs = tuple(output.name for output in request.requested_outputs)
    if len(set(outputs)) != len(outputs):
        duplicate = next(name for name in outputs if outputs.count(name) > 1)
        raise invalid(f"the request names an output twice: {duplicate!r}")
    return outputs


MAX_OPTIONS_BYTES = 2**16  # Maximum bytes of options in one row. They are parsed on the event loop.
MAX_INLINE_ROWS = 128  # more rows take about a millisecond, and are rewritten in a thread


def chat_inputs(spec: InferencePipelineSpec, name: str) -> tuple[str, ...]:
    """Inputs of a pipeline's requests that stages which serve chats read as `name`: texts, or images of a row."""
    sources = [
        split_reference(read.source)
        for stage in spec.stages
        if stage.generates or stage.encodes
        for read in stage.inputs
        if read.name == name
    ]
    inputs = (tensor for tensor in spec.inputs if (REQUEST, tensor.name) in sources)
    return tuple(sorted(i.name for i in inputs if i.datatype == BYTES and (name == IMAGES or not i.shape)))


def is_slow_to_rewrite(names: tuple[str, ...], inputs: Iterable[TensorHeader]) -> bool:
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
