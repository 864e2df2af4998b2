"""Decides whether a request is one this pipeline can serve, before it meets anybody else's rows.

Names, datatypes, shapes and numbers are checked against the pipeline here, so that a caller's mistake never reaches a
batch. Pure: the same request always gets the same verdict.
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
from trimtab_router.request.request_options import NO_WISH, RequestOptions, parse_request_options
from trimtab_router.request.task_names import missing_input, task_inputs

VERSION = "1"
_NOT_DONE = {
    "shared_memory_region": "shared memory is not supported; leave it out, and the answer carries the values",
    "classification": "classification (class_count) is not supported; leave it out, and rank the values of the answer",
}
"""Parameters of a requested output that change where its values are: who is answered otherwise would read something
else. What each is called, and what to do."""


_STATEFUL = ("sequence_id", "sequence_start", "sequence_end")
"""Parameters of a request that ask for state between requests; 0 and false ask for none."""


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request the pipeline can serve."""

    request: InferRequest
    inputs: Mapping[str, Array]
    wanted: tuple[str, ...]
    wish: RequestOptions = NO_WISH


def validate_header(
    pipeline: str, spec: InferencePipelineSpec, request: InferRequest, inputs: Sequence[TensorLike]
) -> tuple[tuple[str, ...], RequestOptions]:
    """Check what a request says of itself against the pipeline, not its values.

    Returns:
        The outputs wanted, and what else the request wishes.

    Raises:
        Refusal: NOT_FOUND for another model or version, INVALID_ARGUMENT naming the tensor or the parameter for
            anything else.
    """
    check_model(pipeline, request.model_name, request.model_version)
    for name in _STATEFUL:
        if request.parameters.get(name):
            raise invalid(f"parameter {name!r}: sequences are not supported, every request stands alone; leave it out")
    known = {declared.name: declared for declared in spec.inputs}
    for tensor in inputs:
        if tensor.name not in known:
            raise invalid(f"unknown input {tensor.name!r}; {pipeline} takes: {', '.join(known)}")
    given = {tensor.name: tensor for tensor in inputs}
    for declared in spec.inputs:
        if declared.name in given:
            _check_tensor(declared, given[declared.name])
        elif not declared.optional and not (TASK in request.parameters and declared.name in task_inputs(spec)):
            raise missing_input(pipeline, declared.name)
    _check_rows(pipeline, spec, inputs)
    return _wanted(pipeline, spec, request), parse_request_options(request.parameters)


def decode_and_validate(pipeline: str, spec: InferencePipelineSpec, pending: PendingRequest) -> ValidatedRequest:
    """Decode a request that was checked, and check its values.

    Raises:
        Refusal: INVALID_ARGUMENT for numbers that are not finite.
        ProtocolError: values that do not fit their description.
    """
    wanted, wish = validate_header(pipeline, spec, pending.request, pending.inputs)
    request = pending.decode()
    for tensor in request.inputs:
        if tensor.datatype.startswith("FP") and not _all_finite(tensor.array):
            raise invalid(f"input {tensor.name!r} holds NaN or an infinity; every number must be finite")
    return ValidatedRequest(request, {tensor.name: tensor.array for tensor in request.inputs}, wanted, wish)


def check_model(pipeline: str, name: str, version: str) -> None:
    """Raise NOT_FOUND unless the name is the pipeline's and the version is empty or the only one."""
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
    # A sum is several times faster than isfinite().all(), and finite only if every term is; overflow is told apart.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(array, axis=None))) or bool(np.isfinite(array).all())


def _check_rows(pipeline: str, spec: InferencePipelineSpec, tensors: Sequence[TensorLike]) -> None:
    if not tensors:
        raise invalid(f"the request has no inputs; {pipeline} needs at least one tensor")
    rows = {tensor.name: tensor.shape[0] for tensor in tensors}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise invalid(f"the inputs must have the same number of rows, but {counts}")
    given = next(iter(rows.values()))
    if given > spec.queue.max_rows:
        raise invalid(f"{given} rows in one request; send at most {spec.queue.max_rows}")


def _wanted(pipeline: str, spec: InferencePipelineSpec, request: InferRequest) -> tuple[str, ...]:
    known = tuple(output.name for output in spec.outputs)
    if not request.requested_outputs:
        return known
    for output in request.requested_outputs:
        if output.name not in known:
            raise invalid(f"unknown output {output.name!r}; {pipeline} gives: {', '.join(known)}")
        for parameter, cure in _NOT_DONE.items():
            if parameter in output.parameters:
                raise invalid(f"output {output.name!r}: {cure}")
    # What is wanted is remembered as a key for as long as the process lives: unequal names bound its length.
    wanted = tuple(output.name for output in request.requested_outputs)
    if len(set(wanted)) != len(wanted):
        twice = next(name for name in wanted if wanted.count(name) > 1)
        raise invalid(f"the request names an output twice: {twice!r}")
    return wanted
