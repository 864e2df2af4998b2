"""A user's subclass of torch.nn.Module as a family.

Before weights are fetched, the class's declared tensors are checked against the stage's, and the variant's parameters
against its constructor.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from trimtab_model_servers.errors import ModelError, first_problem
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.registry import load_class
from trimtab_model_servers.model_protocol import Weights
from trimtab_model_servers.weights.loading import build_with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import Datatype, TensorSpec

Class = type[torch.nn.Module]
_DECLARED = TypeAdapter(dict[str, tuple[Datatype, tuple[int, ...]]])
_KNOBS = frozenset({"modalities", "merging", "prompts", "precision", "compiled", "inputSize"})


def builder_of(family: str) -> Any:
    """The builder of a plugin, with `build(spec)` and `KNOBS` as in this package's modules; raises ModelError."""
    family_class = load_class(family)
    if callable(getattr(family_class, "build", None)):
        return family_class
    if not (inspect.isclass(family_class) and issubclass(family_class, torch.nn.Module)):
        raise ModelError(f"family {family!r} is neither a subclass of torch.nn.Module nor has it `build(spec)`")
    knobs = frozenset(getattr(family_class, "knobs", ()))
    if unknown := sorted(knobs - _KNOBS):
        known = ", ".join(sorted(_KNOBS))
        raise ModelError(f"family {family!r}: unknown knob {unknown[0]!r}; there are: {known}")
    return SimpleNamespace(build=lambda spec: _build(family_class, spec), KNOBS=knobs)


def _build(cls: Class, spec: ModelSpec) -> Built:
    declared = _declared(cls, "outputs")
    check_tensors(_declared(cls, "inputs"), declared, spec)
    check_parameters(cls, spec)
    module, random = build_with_weights(spec, lambda: _construct(cls, spec))
    outputs = tuple(tensor.name for tensor in declared)
    weights: Weights = "stored" if not random else "random" if module.state_dict() else "none"
    return Built(UserNetwork(module, outputs), weights)


def _construct(cls: Class, spec: ModelSpec) -> torch.nn.Module:
    try:
        return cls(**spec.parameters)
    except Exception as error:
        raise ModelError(f"family {spec.family!r}: constructor: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class UserNetwork:
    """Calls a user's module: `infer` if it has one, else `forward` with the tensors by name."""

    module: torch.nn.Module
    outputs: tuple[str, ...]

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Compute one batch; raises TypeError if the module returns other tensors than its outputs."""
        infer = getattr(self.module, "infer", None)
        result = self.module(**inputs) if infer is None else infer(inputs, point)
        if isinstance(result, Mapping):
            return dict(result)
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        if len(tensors) != len(self.outputs):
            raise TypeError(
                f"{type(self.module).__name__} returned {len(tensors)} tensors, not {', '.join(self.outputs)}; "
                "return a dict of name to tensor"
            )
        return dict(zip(self.outputs, tensors, strict=True))

    def move_to(self, device: torch.device) -> None:
        """Move the module to a device; tensors that it creates must be on the device of its inputs."""
        self.module.to(device)


def check_parameters(cls: Class, spec: ModelSpec) -> None:
    """Raise ModelError unless the variant's parameters are those of the constructor."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**spec.parameters)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ModelError(f"family {spec.family!r}: parameters: {error}; there are: {known}") from error


def check_tensors(
    reads: Iterable[TensorSpec], returns: Iterable[TensorSpec], spec: ModelSpec, optional: Collection[str] = ()
) -> None:
    """Check the tensors that a family declares against those of its stage; raises ModelError if they differ."""
    inputs, outputs = ({tensor.name: tensor for tensor in tensors} for tensors in (reads, returns))
    for name in (inputs.keys() ^ {tensor.name for tensor in spec.inputs}) - set(inputs).intersection(optional):
        whose = "reads" if name in inputs else "does not read"
        raise ModelError(
            f"family {spec.family!r} {whose} {name!r}; it reads: {', '.join(inputs)}, its stage's inputs are: "
            f"{', '.join(tensor.name for tensor in spec.inputs)}"
        )
    for tensor in spec.inputs:
        _require_same(spec, "reads", inputs[tensor.name], tensor)
    for output in spec.outputs:
        if output.name not in outputs:
            raise ModelError(f"family {spec.family!r} returns no {output.name!r}; it returns: {', '.join(outputs)}")
        _require_same(spec, "returns", outputs[output.name], output)


def _require_same(spec: ModelSpec, verb: str, declared: TensorSpec, expected: TensorSpec) -> None:
    same_size = len(declared.shape) == len(expected.shape) and all(
        -1 in {left, right} or left == right for left, right in zip(declared.shape, expected.shape, strict=True)
    )
    if declared.datatype != expected.datatype or not same_size:
        raise ModelError(
            f"family {spec.family!r} {verb} {declared.name!r} as {declared.datatype} {[*declared.shape]}, "
            f"but its stage has it as {expected.datatype} {[*expected.shape]}; correct one of them"
        )


def _declared(cls: Class, kind: str) -> tuple[TensorSpec, ...]:
    declaration = getattr(cls, kind, None)
    attribute = f"{cls.__module__}:{cls.__qualname__}.{kind}"
    example = f'{kind} = {{"image": ("FP32", (3, 224, 224))}}'
    if not declaration:
        raise ModelError(f"{attribute} is missing; declare it as a class attribute: {example}")
    try:
        tensors = _DECLARED.validate_python(declaration).items()
        return tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in tensors)
    except ValidationError as error:
        raise ModelError(f"{attribute}: {first_problem(error)}; write {example}") from error
