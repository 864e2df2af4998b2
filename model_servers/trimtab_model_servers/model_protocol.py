"""Validation of requests, response parameters and metadata of a served model."""

from collections.abc import Mapping, Sequence
from typing import Literal

from trimtab_model_servers.errors import RefusalError
from trimtab_pipelines.model_spec import InputSpec, ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import Parameter, Parameters, RequestedOutput, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT

PLATFORM = "trimtab_pytorch"
Weights = Literal["stored", "random", "none"]
Fact = bool | int | float | str


def validate_rows(spec: ModelSpec, tensors: Sequence[Tensor], *, max_rows: int | None = None) -> int:
    """Check a batch's tensors against the model's inputs; return the number of rows; raises RefusalError 400.

    ``max_rows`` replaces the maximum batch size if nothing is computed. NaN and infinity are valid: rows do not affect
    one another.
    """
    names = {expected.name for expected in spec.inputs}
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in by_name:
        if name not in names:
            raise RefusalError(400, f"model {spec.name!r} has no input {name!r}; it reads: {', '.join(sorted(names))}")
    for expected in spec.inputs:
        if expected.name in by_name:
            _check(spec, expected, by_name[expected.name])
        elif not expected.optional:
            form = _describe(expected)
            raise RefusalError(400, f"model {spec.name!r}: input {expected.name!r} is missing; send {form}")
    return _common_rows(spec, tensors, spec.max_batch_size if max_rows is None else max_rows)


def select_operating_point(spec: ModelSpec, parameters: Parameters) -> OperatingPoint:
    """The requested operating point, by default the first; RefusalError 400 if unknown."""
    name = parameters.get(OPERATING_POINT)
    if name is None:
        return spec.operating_points[0]
    point = spec.point(str(name))
    if point is None:
        names = ", ".join(point.name for point in spec.operating_points)
        raise RefusalError(400, f"model {spec.name!r} has no operating point {name!r}; it has: {names}")
    return point


def select_outputs(spec: ModelSpec, requested: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """The names of the requested outputs, by default all; RefusalError 400 if unknown."""
    names = [output.name for output in spec.outputs]
    if not requested:
        return tuple(names)
    for output in requested:
        if output.name not in names:
            raise RefusalError(400, f"model {spec.name!r} has no output {output.name!r}; it has: {', '.join(names)}")
    return tuple(output.name for output in requested)


def _check(spec: ModelSpec, expected: InputSpec, tensor: Tensor) -> None:
    prefix, form = f"model {spec.name!r}: input {tensor.name!r}", _describe(expected)
    if tensor.datatype != expected.datatype:
        raise RefusalError(400, f"{prefix} came as {tensor.datatype}; send {form}")
    if not expected.fits(tensor.shape):
        raise RefusalError(400, f"{prefix} has shape {list(tensor.shape)}; send {form}")


def _common_rows(spec: ModelSpec, tensors: Sequence[Tensor], max_rows: int) -> int:
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        counts = ", ".join(f"{tensor.name} {tensor.shape[0]}" for tensor in tensors)
        raise RefusalError(400, f"model {spec.name!r}: all inputs must have the same number of rows, but: {counts}")
    count = rows.pop() if rows else 0
    if count == 0:
        raise RefusalError(400, f"model {spec.name!r}: the batch is empty; send 1 to {max_rows} rows")
    if count > max_rows:
        raise RefusalError(400, f"model {spec.name!r}: {count} rows exceed the maximum batch; send 1 to {max_rows}")
    return count


def _describe(expected: InputSpec) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in expected.shape)
    return f"{expected.datatype} [rows{', ' if sizes else ''}{sizes}]"


def metadata_facts(spec: ModelSpec, weights: Weights, family_facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Metadata beyond the protocol's; lists are comma-separated, because parameters have none."""
    return {
        "family": spec.family,
        "weights": weights,
        "accuracy": spec.accuracy,
        "operating_points": ",".join(point.name for point in spec.operating_points),
        "max_batch_size": spec.max_batch_size,
        "threads": spec.threads,
        **family_facts,
    }


def response_parameters(spec: ModelSpec, seconds: float) -> dict[str, Parameter]:
    """Response parameters of a model with a single operating point."""
    return {OPERATING_POINT: spec.operating_points[0].name, COMPUTE_SECONDS: round(seconds, 9)}


def metadata_of(spec: ModelSpec, facts: Mapping[str, Fact]) -> dict[str, object]:
    """The protocol's model metadata, with ``facts`` under `parameters`."""
    return {
        "name": spec.name,
        "versions": [],
        "platform": PLATFORM,
        "inputs": [tensor_metadata(tensor) for tensor in spec.inputs],
        "outputs": [tensor_metadata(tensor) for tensor in spec.outputs],
        "parameters": dict(facts),
    }


def tensor_metadata(tensor: TensorSpec) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}
