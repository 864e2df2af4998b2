"""Decides whether a request is one this pipeline can serve, before it meets anybody else's rows.

Names, datatypes, shapes and numbers are checked against the pipeline here, so that a caller's mistake never reaches a
batch. Pure: the same request always gets the same verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.tensors import RequestInput
from trimtab_protocol import InferRequest, Parameters, Tensor
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Code, Refusal, invalid

VERSION = "1"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request the pipeline can serve."""

    rows: int
    inputs: Mapping[str, Array]
    wanted: tuple[str, ...]
    payload_bytes: int


def admit(pipeline: str, spec: InferencePipelineSpec, request: InferRequest) -> Admitted:
    """Check a request against the pipeline.

    Raises:
        Refusal: NOT_FOUND for another model or version, INVALID_ARGUMENT naming the tensor for anything else.
    """
    check_model(pipeline, request.model_name, request.model_version)
    known = {declared.name: declared for declared in spec.inputs}
    for tensor in request.inputs:
        if tensor.name not in known:
            raise invalid(f"unknown input {tensor.name!r}; {pipeline} takes: {', '.join(known)}")
    inputs = {tensor.name: tensor for tensor in request.inputs}
    for declared in spec.inputs:
        if declared.name in inputs:
            _check_tensor(declared, inputs[declared.name])
        elif not declared.optional:
            raise invalid(f"input {declared.name!r} is missing; {pipeline} needs it")
    return Admitted(
        rows=_common_rows(pipeline, request.inputs),
        inputs={name: tensor.array for name, tensor in inputs.items()},
        wanted=_wanted(pipeline, spec, request),
        payload_bytes=sum(tensor.array.nbytes for tensor in request.inputs),
    )


def check_model(pipeline: str, name: str, version: str) -> None:
    """Raise NOT_FOUND unless the name is the pipeline's and the version is empty or the only one."""
    if name != pipeline:
        raise Refusal(Code.NOT_FOUND, "UnknownModel", f"unknown model {name!r}; this router serves {pipeline!r}")
    if version not in {"", VERSION}:
        raise Refusal(
            Code.NOT_FOUND, "UnknownVersion", f"model {name!r} has no version {version!r}; it has version {VERSION!r}"
        )


def timeout_seconds(parameters: Parameters) -> float | None:
    """The `timeout` parameter in seconds; None where it is absent or 0.

    Raises:
        Refusal: INVALID_ARGUMENT for anything but a non-negative integer of microseconds.
    """
    timeout = parameters.get("timeout", 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool):
        raise invalid(f"parameter 'timeout' is {timeout!r}; it must be an integer number of microseconds")
    if timeout < 0:
        raise invalid(f"parameter 'timeout' is {timeout}; it must be at least 0 microseconds (0 means the SLO)")
    return timeout / 1e6 if timeout else None


def _check_tensor(declared: RequestInput, tensor: Tensor) -> None:
    if tensor.datatype != declared.datatype:
        raise invalid(f"input {tensor.name!r} is {tensor.datatype}; it must be {declared.datatype}")
    shape = tensor.shape
    if len(shape) != len(declared.shape) + 1 or not all(
        size in {-1, given} for size, given in zip(declared.shape, shape[1:], strict=True)
    ):
        right = ", ".join(["rows", *(str(size) if size >= 0 else "any" for size in declared.shape)])
        raise invalid(f"input {tensor.name!r} has shape {list(shape)}; it must be [{right}]")
    if not shape[0]:
        raise invalid(f"input {tensor.name!r} has no rows; its first dimension must be at least 1")
    if tensor.datatype.startswith("FP") and not _all_finite(tensor.array):
        raise invalid(f"input {tensor.name!r} holds NaN or an infinity; every number must be finite")


def _all_finite(array: Array) -> bool:
    # A sum is several times faster than isfinite().all(), and finite only if every term is; overflow is told apart.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(array, axis=None))) or bool(np.isfinite(array).all())


def _common_rows(pipeline: str, tensors: tuple[Tensor, ...]) -> int:
    if not tensors:
        raise invalid(f"the request has no inputs; {pipeline} needs at least one tensor")
    rows = {tensor.name: tensor.shape[0] for tensor in tensors}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise invalid(f"the inputs must have the same number of rows, but {counts}")
    return next(iter(rows.values()))


def _wanted(pipeline: str, spec: InferencePipelineSpec, request: InferRequest) -> tuple[str, ...]:
    known = tuple(output.name for output in spec.outputs)
    if not request.requested_outputs:
        return known
    wanted = tuple(output.name for output in request.requested_outputs)
    for name in wanted:
        if name not in known:
            raise invalid(f"unknown output {name!r}; {pipeline} gives: {', '.join(known)}")
    return wanted
