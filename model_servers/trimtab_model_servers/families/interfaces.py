"""Interfaces of model families, and their settings, read from a variant's `parameters`; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, ValidationError

from trimtab_model_servers.errors import ModelError, first_problem
from trimtab_model_servers.model_protocol import Fact
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

if TYPE_CHECKING:
    import torch

Settings = TypeVar("Settings", bound=BaseModel)


class Network(Protocol):
    """A model that computes one batch."""

    def infer(self, inputs: dict[str, Any], point: OperatingPoint) -> dict[str, Any]:
        """Compute one batch at an operating point: named torch tensors to named torch tensors, rows first.

        BYTES are NumPy arrays of `bytes`; all tensors are NumPy arrays if the family is one of NUMPY_FAMILIES. Called
        in inference mode, by one thread at a time. The operating point may differ from batch to batch; a family without
        `KNOBS` may ignore it.
        """


@runtime_checkable
class HasExamples(Protocol):
    """A network with a valid value for each BYTES input, to warm up with."""

    def example(self, name: str) -> bytes: ...


@runtime_checkable
class MayBeCompiled(Protocol):
    """A network that may compile itself when it first computes one row, and again for more than one."""

    compiled: bool


@runtime_checkable
class RegistersTasks(Protocol):
    """A network that loads tasks while it serves."""

    def reload_tasks(self) -> None: ...

    def facts(self) -> dict[str, Fact]: ...


@runtime_checkable
class MovesToDevice(Protocol):
    """A network that can compute on other devices than the CPU."""

    def move_to(self, device: "torch.device") -> None: ...


@dataclass(frozen=True, slots=True)
class Built:
    """A network, the source of its weights, and further metadata."""

    network: Network
    weights: Literal["stored", "random", "none"]
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, *, random: bool) -> Self:
        return cls(network, "random" if random else "stored")


class Parameters(BaseModel):
    """Base class of a family's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_parameters(settings: type[Settings], spec: ModelSpec) -> Settings:
    """Check a variant's parameters; raises ModelError if one is unknown or invalid."""
    try:
        return settings.model_validate(spec.parameters)
    except ValidationError as error:
        names = ", ".join(settings.model_fields) or "none"
        raise ModelError(f"family {spec.family!r}: parameters.{first_problem(error)}; there are: {names}") from error
