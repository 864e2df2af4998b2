"""Base classes of all resources: apiVersion, kind, metadata and a frozen, strict body in camelCase."""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

API_VERSION: Literal["trimtab.dev/v1alpha1"] = "trimtab.dev/v1alpha1"
ADVISORY_SUFFIX = "-advisory"
"""Suffix of the names of advisory PipelinePlans; reserved."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        max_length=63,
        description="Lower-case letters, digits and dashes (a Kubernetes name).",
    ),
]


def is_empty(value: object) -> bool:
    """Whether a field is empty, zero or false and omitted, so that older readers do not see an unknown field."""
    return not value


class Model(BaseModel):
    """A frozen value that rejects unknown fields; camelCase in documents, snake_case in Python."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
    )

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields, not validated, and without cached properties, which may depend on them."""
        copy = self.model_copy(update=fields)
        for cached in vars(copy).keys() - type(self).model_fields.keys():
            del vars(copy)[cached]
        return copy

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by the string literal below it.

        pydantic's `use_attribute_docstrings` does the same, but reads the sources whenever a program starts.
        """
        described = handler(schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, text in _field_docstrings(cls):
            properties[cls.model_fields[name].alias or name]["description"] = text
        return described


def _field_docstrings(model: type[Model]) -> Iterator[tuple[str, str]]:
    """Name and documentation of each field, the base classes' first."""
    for owner in reversed(model.__mro__):
        if issubclass(owner, Model):
            definition = ast.parse(inspect.getsource(owner)).body[0]
            assert isinstance(definition, ast.ClassDef)  # noqa: S101 - for mypy
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        yield name, " ".join(text.split())


class Metadata(BaseModel):
    """Identity of a resource; other metadata fields are preserved."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Name
    namespace: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Resource(Model):
    """A Kubernetes resource. `status` is written by controllers and excluded."""

    api_version: Literal["trimtab.dev/v1alpha1"] = API_VERSION
    kind: str
    metadata: Metadata
    status: dict[str, Any] | None = Field(default=None, exclude=True)
    spec: Any

    def with_spec(self, **fields: Any) -> Self:
        return self.replace(spec=self.spec.replace(**fields))

    def with_metadata(self, **fields: Any) -> Self:
        return self.replace(metadata=self.metadata.model_copy(update=fields))


def require_unique(names: Iterable[str], where: str) -> None:
    """Raise ValueError with the first duplicate name."""
    unique: set[str] = set()
    for name in names:
        if name in unique:
            raise ValueError(f"{where}: duplicate name {name!r}; names must be unique")
        unique.add(name)


class Named(Protocol):
    """An item of a list that is keyed by name."""

    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def find_named(items: Sequence[AnyNamed], name: str, missing: str) -> AnyNamed:
    """The item of a name; KeyError begins with `missing` and lists the known names."""
    for item in items:
        if item.name == name:
            return item
    raise KeyError(f"{missing} {name!r}; it has: {', '.join(item.name for item in items)}")
