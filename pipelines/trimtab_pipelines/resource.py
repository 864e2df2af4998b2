"""The shape all our documents share: apiVersion, kind, metadata and a frozen, strict body in camelCase."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

API_VERSION = "trimtab.dev/v1alpha1"
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

    api_version: str = API_VERSION
    kind: str
    metadata: Metadata
    status: dict[str, Any] | None = Field(default=None, exclude=True)
