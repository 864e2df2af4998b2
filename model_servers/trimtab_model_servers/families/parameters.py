"""Settings of a family, read from a variant's `parameters`; errors name the parameter and the ones there are."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trimtab_model_servers.errors import ModelError, problem_of
from trimtab_pipelines.model_spec import ModelSpec


class Parameters(BaseModel):
    """Base of every family's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Settings = TypeVar("Settings", bound=BaseModel)


def read_parameters(settings: type[Settings], spec: ModelSpec) -> Settings:
    """Check a variant's parameters.

    Raises:
        ModelError: unknown, or of a value that cannot be.
    """
    try:
        return settings.model_validate(spec.parameters)
    except ValidationError as error:
        known = ", ".join(settings.model_fields) or "none"
        raise ModelError(f"family {spec.family!r}: parameters.{problem_of(error)}; there are: {known}") from error
