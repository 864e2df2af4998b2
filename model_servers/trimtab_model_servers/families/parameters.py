"""Settings of a family, read from a variant's `parameters`; errors list the known parameters."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trimtab_model_servers.errors import ModelError, first_problem
from trimtab_pipelines.model_spec import ModelSpec


class Parameters(BaseModel):
    """Base class of a family's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Settings = TypeVar("Settings", bound=BaseModel)


def read_parameters(settings: type[Settings], spec: ModelSpec) -> Settings:
    """Check a variant's parameters.

    Raises:
        ModelError: unknown parameter or invalid value.
    """
    try:
        return settings.model_validate(spec.parameters)
    except ValidationError as error:
        names = ", ".join(settings.model_fields) or "none"
        raise ModelError(f"family {spec.family!r}: parameters.{first_problem(error)}; there are: {names}") from error
