"""Validation of a request against the pipeline: names, datatypes, shapes, finite numbers and request options.

A client's error is found here, before its rows share a batch with those of others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.tensors import RequestInput
from trimtab_protocol import InferRequest, PendingRequest
from trimtab_protocol.extensions import TASK
from trimtab_protocol.tensors import Array, TensorLike
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.request.request_options import NO_OPTIONS, RequestOptions, parse_request_options
from trimtab_router.request.task_names import missing_input, task_inputs

VERSION = "1"
_UNSUPPORTED = {
    "shared_memory_region": "shared memory is not supported; leave it out, and the response contains the values",
    "classification": "classification (class_count) is not supported; leave it out, and rank the values yourself",
}
"""Unsupported parameters of a requested output, with the remedy. They would change where the values are returned."""


_STATEFUL = ("sequence_id", "sequence_start", "sequence_end")
"""Request parameters that ask for state between requests. 0 and false ask for none."""


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request that the pipeline can serve."""

    request: InferRequest
    inputs: Mapping[str, Array]
    requested_outputs: tuple[str, ...]
    options: RequestOptions = NO_OPTIONS


def validate_header(
    pipeline: str, spec: InferencePipelineSpec, request: InferRequest, inputs: Sequence[TensorLike]
) -> tuple[tuple[str, ...], RequestOptions]:
    """Validate a request's description against the pipeline, without its values.

    Returns:
        Requested outputs and request options.

    Raises:
        Refusal: NOT_FOUND for another model or version, else INVALID_ARGUMENT that names the tensor or parameter.
    """
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


def decode_and_validate(pipeline: str, spec: InferencePipelineSpec, pending: PendingRequest) -> ValidatedRequest:
    """Decode a request and validate its values.

    Raises:
        Refusal: as `validate_header`, and INVALID_ARGUMENT for numbers that are not finite.
        ProtocolError: values that do not match their description.
    """
    outputs, options = validate_header(pipeline, spec, pending.request, pending.inputs)
    request = pending.decode()
    for tensor in request.inputs:
        if tensor.datatype.startswith("FP") and not _all_finite(tensor.array):
            raise invalid(f"input {tensor.name!r} holds NaN or an infinity; every number must be finite")
    return ValidatedRequest(request, {tensor.name: tensor.array for tensor in request.inputs}, outputs, options)


def check_model(pipeline: str, name: str, version: str) -> None:
    """Raise NOT_FOUND unless name and version are the pipeline's. An empty version is accepted."""
    if name != pipeline:
        raise Refusal(ErrorCode.NOT_FOUND, "UnknownModel", f"unknown model {name!r}; this router serves {pipeline!r}")
    if version not in {"", VERSION}:
        raise Refusal(
            ErrorCode.NOT_FOUND,
            "UnknownVersion",
            f"model {name!r} has no version {version!r}; it has version {VERSION!r}",
        )


def _check_tensor(declared: RequestInput, tensor: TensorLike) -> None:
    if tensor.datatype != declared.datatype:
        raise invalid(f"input {tensor.name!r} is {tensor.datatype}; it must be {declared.datatype}")
    shape = tensor.shape
    if not declared.fits(shape):
        right = ", ".join(["rows", *(str(size) if size >= 0 else "any" for size in declared.shape)])
        raise invalid(f"input {tensor.name!r} has shape {list(shape)}; it must be [{right}]")
    if not shape[0]:
        raise invalid(f"input {tensor.name!r} has no rows; its first dimension must be at least 1")


def _all_finite(array: Array) -> bool:
    # A sum is several times faster than isfinite().all(). It may also overflow, so a non-finite sum is checked again.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(array, axis=None))) or bool(np.isfinite(array).all())


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
