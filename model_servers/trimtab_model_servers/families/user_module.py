"""A user's own class of torch.nn.Module as a family.

What the class says is checked before any weights are fetched: the tensors it reads and gives against its stage's, the
variant's parameters against what its constructor takes.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.plugins import load_class
from trimtab_model_servers.weights import with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import Datatype, TensorSpec

Class = type[torch.nn.Module]
_DECLARED = TypeAdapter(dict[str, tuple[Datatype, tuple[int, ...]]])
_KNOBS = frozenset({"modalities", "merging", "prompts", "precision", "compiled", "inputSize"})


def builder_of(family: str) -> Any:
    """What builds a family from outside, with `build(spec)` and `KNOBS` as our own families' modules have them.

    Raises:
        ModelError: it cannot be imported, or is nothing that can be served.
    """
    found = load_class(family)
    if callable(getattr(found, "build", None)):
        return found
    if not (inspect.isclass(found) and issubclass(found, torch.nn.Module)):
        raise ModelError(f"family {family!r} is neither a class of torch.nn.Module nor has it `build(spec)`")
    knobs = frozenset(getattr(found, "knobs", ()))
    if unknown := sorted(knobs - _KNOBS):
        known = ", ".join(sorted(_KNOBS))
        raise ModelError(f"family {family!r}: knobs {unknown[0]!r} is not known; there are: {known}")
    return SimpleNamespace(build=lambda spec: _build(found, spec), KNOBS=knobs)


def _build(cls: Class, spec: ModelSpec) -> Built:
    """Make a user's module with stored or random weights."""
    check_tensors(cls, spec)
    check_parameters(cls, spec)
    module, random = with_weights(spec, lambda: _construct(cls, spec))
    outputs = tuple(tensor.name for tensor in _declared(cls, "outputs"))
    return Built(UserNetwork(module, outputs), _where_from(module, random=random))


def _construct(cls: Class, spec: ModelSpec) -> torch.nn.Module:
    try:
        return cls(**spec.parameters)
    except Exception as error:
        raise ModelError(f"family {spec.family!r}: making it: {type(error).__name__}: {error}") from error


def _where_from(module: torch.nn.Module, *, random: bool) -> Literal["stored", "random", "none"]:
    if not random:
        return "stored"
    return "random" if module.state_dict() else "none"


@dataclass(frozen=True, slots=True)
class UserNetwork:
    """A user's module as the model server calls it: by `infer` where it has one, else with each tensor by its name."""

    module: torch.nn.Module
    outputs: tuple[str, ...]

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Compute one batch.

        Raises:
            TypeError: it gave something else than its outputs.
        """
        own = getattr(self.module, "infer", None)
        found = self.module(**inputs) if own is None else own(inputs, point)
        if isinstance(found, Mapping):
            return dict(found)
        listed = found if isinstance(found, (tuple, list)) else (found,)
        if len(listed) != len(self.outputs):
            raise TypeError(
                f"{type(self.module).__name__} gave {len(listed)} tensors, but declares {', '.join(self.outputs)}; "
                "return a dict of name to tensor"
            )
        return dict(zip(self.outputs, listed, strict=True))

    def place(self, device: torch.device) -> None:
        """Bring the module to a device; what it makes itself it must make where its inputs are."""
        self.module.to(device)


def check_parameters(cls: Class, spec: ModelSpec) -> None:
    """Check a variant's parameters against what the class's constructor takes.

    Raises:
        ModelError: one that it does not know, or lacks; the message names those there are.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(**spec.parameters)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ModelError(f"family {spec.family!r}: parameters: {error}; there are: {known}") from error


def check_tensors(cls: Class, spec: ModelSpec) -> None:
    """Check the tensors that a class declares against those of the stage it is a variant of.

    Raises:
        ModelError: naming the tensor, what the class declares and what the stage does.
    """
    inputs, outputs = ({t.name: t for t in _declared(cls, kind)} for kind in ("inputs", "outputs"))
    for name in inputs.keys() ^ {given.name for given in spec.inputs}:
        whose = "reads" if name in inputs else "does not read"
        raise ModelError(
            f"family {spec.family!r} {whose} {name!r}; it reads: {', '.join(inputs)}, its stage's inputs are: "
            f"{', '.join(given.name for given in spec.inputs)}"
        )
    for given in spec.inputs:
        _require_same(spec, "reads", inputs[given.name], given)
    for asked in spec.outputs:
        if asked.name not in outputs:
            raise ModelError(f"family {spec.family!r} gives no {asked.name!r}; it gives: {', '.join(outputs)}")
        _require_same(spec, "gives", outputs[asked.name], asked)


def _require_same(spec: ModelSpec, verb: str, declared: TensorSpec, asked: TensorSpec) -> None:
    same_size = len(declared.shape) == len(asked.shape) and all(
        -1 in {own, other} or own == other for own, other in zip(declared.shape, asked.shape, strict=True)
    )
    if declared.datatype != asked.datatype or not same_size:
        raise ModelError(
            f"family {spec.family!r} {verb} {declared.name!r} as {declared.datatype} {[*declared.shape]}, "
            f"but its stage has it as {asked.datatype} {[*asked.shape]}; correct one of them"
        )


def _declared(cls: Class, kind: str) -> tuple[TensorSpec, ...]:
    """Read a class's `inputs` or `outputs`."""
    written = getattr(cls, kind, None)
    where = f"{cls.__module__}:{cls.__qualname__}.{kind}"
    example = f'{kind} = {{"image": ("FP32", (3, 224, 224))}}'
    if not written:
        raise ModelError(f"{where} is missing; declare it as a class attribute: {example}")
    try:
        found = _DECLARED.validate_python(written)
        return tuple(TensorSpec(name=name, datatype=kind_, shape=shape) for name, (kind_, shape) in found.items())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ModelError(f"{where}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; write {example}") from error
