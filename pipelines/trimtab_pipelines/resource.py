"""The shape all our documents share: apiVersion, kind, metadata and a frozen, strict body in camelCase."""

from collections.abc import Iterable, Sized
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

API_VERSION: Literal["trimtab.dev/v1alpha1"] = "trimtab.dev/v1alpha1"
ADVISORY_SUFFIX = "-advisory"
"""How the name of a PipelinePlan ends that nothing acts on; no pipeline's own may."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=63,
        description="Lower-case letters, digits and dashes (a Kubernetes name)",
    ),
]


def is_empty(value: Sized) -> bool:
    """Tell whether a field has nothing to say. Left out then, it troubles no older reader that does not know it."""
    return not value


class Model(BaseModel):
    """A frozen value whose unknown fields are errors; camelCase outside, snake_case inside."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
        use_attribute_docstrings=False,
    )


class Metadata(BaseModel):
    """Who a resource is. What a cluster adds to metadata is carried along unread."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Name
    namespace: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Resource(Model):
    """A Kubernetes resource of ours. `status` belongs to whoever reports and is not part of what was asked."""

    api_version: Literal["trimtab.dev/v1alpha1"] = API_VERSION
    kind: str
    metadata: Metadata
    status: dict[str, Any] | None = Field(default=None, exclude=True)


def require_unique(names: Iterable[str], where: str) -> None:
    """Raise ValueError that shows the first name standing twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{where}: the name {name!r} stands twice; names must be unique")
        seen.add(name)
