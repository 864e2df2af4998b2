"""Whether a request fits the model it names, decided before anything is computed. Pure; a misfit is a 400."""

from collections.abc import Sequence

from trimtab_model_servers.errors import RefusalError
from trimtab_pipelines.model_spec import InputSpec, ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol import Parameters, RequestedOutput, Tensor
from trimtab_protocol.extensions import OPERATING_POINT


def validate_rows(spec: ModelSpec, tensors: Sequence[Tensor], *, most: int | None = None) -> int:
    """The rows of a batch whose tensors are those the model reads, at most as many as a batch of it may hold.

    ``most`` may come instead, where nothing is computed. NaN and infinity pass: rows do not influence one another, so
    one caller's NaN is that caller's alone.

    Raises:
        RefusalError: 400, naming the tensor and what would be right.
    """
    given = {tensor.name: tensor for tensor in tensors}
    known = {expected.name for expected in spec.inputs}
    for name in given:
        if name not in known:
            raise RefusalError(400, f"model {spec.name!r} has no input {name!r}; it reads: {', '.join(sorted(known))}")
    for expected in spec.inputs:
        if expected.name in given:
            _check(spec, expected, given[expected.name])
        elif not expected.optional:
            raise RefusalError(400, f"model {spec.name!r}: input {expected.name!r} is missing; send {_words(expected)}")
    return _common_rows(spec, tensors, spec.max_batch_size if most is None else most)


def chosen_point(spec: ModelSpec, parameters: Parameters) -> OperatingPoint:
    """The operating point a request asks for, the first where it asks for none; RefusalError 400 if unknown."""
    asked = parameters.get(OPERATING_POINT)
    if asked is None:
        return spec.operating_points[0]
    point = spec.point(str(asked))
    if point is None:
        known = ", ".join(point.name for point in spec.operating_points)
        raise RefusalError(400, f"model {spec.name!r} has no operating point {asked!r}; it has: {known}")
    return point


def chosen_outputs(spec: ModelSpec, requested: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """The names of the outputs to answer with, all where none is requested; RefusalError 400 if unknown."""
    known = [output.name for output in spec.outputs]
    if not requested:
        return tuple(known)
    for output in requested:
        if output.name not in known:
            raise RefusalError(400, f"model {spec.name!r} has no output {output.name!r}; it gives: {', '.join(known)}")
    return tuple(output.name for output in requested)


def _check(spec: ModelSpec, expected: InputSpec, tensor: Tensor) -> None:
    if tensor.datatype != expected.datatype:
        raise RefusalError(
            400, f"model {spec.name!r}: input {tensor.name!r} came as {tensor.datatype}; send {_words(expected)}"
        )
    if not expected.fits(tensor.shape):
        raise RefusalError(
            400, f"model {spec.name!r}: input {tensor.name!r} has shape {list(tensor.shape)}; send {_words(expected)}"
        )


def _common_rows(spec: ModelSpec, tensors: Sequence[Tensor], most: int) -> int:
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        each = ", ".join(f"{tensor.name} {tensor.shape[0]}" for tensor in tensors)
        raise RefusalError(400, f"model {spec.name!r}: all inputs must have the same number of rows, but: {each}")
    count = rows.pop() if rows else 0
    if count == 0:
        raise RefusalError(400, f"model {spec.name!r}: the batch is empty; send 1 to {most} rows")
    if count > most:
        raise RefusalError(400, f"model {spec.name!r}: {count} rows are more than a batch may hold; send 1 to {most}")
    return count


def _words(expected: InputSpec) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in expected.shape)
    return f"{expected.datatype} [rows{', ' if sizes else ''}{sizes}]"
