"""Structural OpenAPI schemas of pydantic models, without references and with bounds, defaults and merge keys.

Kubernetes requires structural schemas. Optional fields are omitted rather than null. Defaults are serialized like
documents, so that values that the server fills in parse to the same value.
"""

import typing
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import annotated_types
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from trimtab_pipelines.quantity import DURATION_PATTERN, QUANTITY_PATTERN
from trimtab_pipelines.rendering.crd_rules import RULES

Schema = dict[str, Any]
_SUPPORTED = {"type", "description", "enum", "pattern", "format", "items", "required"}
_SUPPORTED |= {"minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"}
_POSITIVE = r"([0-9]*[1-9][0-9]*(?:\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)"
_ANY_AMOUNT = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """Structural schema of a model; without defaults for statuses, to which the API server must not add fields."""
    models = {inner.__name__: inner for inner in _models_in(model)}
    return _Renderer(model.model_json_schema(by_alias=True), models, defaults=defaults).render(model)


def validations(model: type[BaseModel]) -> Schema:
    rules = RULES.get(model, ())
    return {"x-kubernetes-validations": [asdict(rule) for rule in rules]} if rules else {}


class _Renderer:
    """Converts pydantic's JSON schema, using the models for information that the schema lacks."""

    def __init__(self, schema: Schema, models: dict[str, type[BaseModel]], *, defaults: bool) -> None:
        self._definitions = schema.get("$defs", {})
        self._root = schema
        self._models = models
        self._defaults = defaults

    def render(self, model: type[BaseModel]) -> Schema:
        node = self._definitions.get(model.__name__, self._root)
        result: Schema = {"type": "object", "description": node["description"]} if "description" in node else {}
        result |= {"type": "object", **({"required": [*node["required"]]} if "required" in node else {})}
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        result["properties"] = {name: self._field(part, fields[name]) for name, part in node["properties"].items()}
        return result | validations(model)

    def _field(self, node: Schema, field: FieldInfo) -> Schema:
        result = self._node(node)
        if result.get("pattern") in {QUANTITY_PATTERN, DURATION_PATTERN}:
            above_zero = any(isinstance(m, annotated_types.Gt) for m in field.metadata)
            result |= _amount(result, above_zero=above_zero)
        default = _default(field) if self._defaults else None
        return result if default is None else {**result, "default": default}

    def _node(self, node: Schema) -> Schema:
        if "$ref" in node:
            target = node["$ref"].rpartition("/")[2]
            resolved = (
                self.render(self._models[target]) if target in self._models else self._node(self._definitions[target])
            )
            return {**resolved, **({"description": node["description"]} if "description" in node else {})}
        if "anyOf" in node:
            return self._alternatives(node)
        result = {key: _copied(value) for key, value in node.items() if key in _SUPPORTED}
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive in node:
                result |= {bound: node[exclusive], exclusive: True}
        if "items" in node:
            result["items"] = self._node(node["items"])
            result |= _merge_keys(result["items"])
        for values in (node.get("additionalProperties"), *node.get("patternProperties", {}).values()):
            if isinstance(values, dict):  # patterns of keys are checked by the model
                inner = self._node(values)
                result |= {"additionalProperties": inner} if inner else {"x-kubernetes-preserve-unknown-fields": True}
        if result.get("pattern") == QUANTITY_PATTERN:
            result = {"x-kubernetes-int-or-string": True, **{k: v for k, v in result.items() if k != "type"}}
        return result

    def _alternatives(self, node: Schema) -> Schema:
        """Schema of a union: an optional value is its type; a union of scalars accepts anything."""
        outer = {"description": node["description"]} if "description" in node else {}
        choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        if len(choices) == 1:
            return {**self._node(choices[0]), **outer}
        return {**outer, "x-kubernetes-preserve-unknown-fields": True}


def _copied(value: Any) -> Any:
    """Copy a list; one list in two places would be serialized as a YAML alias."""
    return [*value] if isinstance(value, list) else value


def _amount(written: Schema, *, above_zero: bool) -> Schema:
    """Bounds of a duration, which is text, or of a quantity, which may also be an integer."""
    minimum = {"minimum": int(above_zero)} if "x-kubernetes-int-or-string" in written else {}
    return {**minimum, "pattern": written["pattern"].replace(_ANY_AMOUNT, _POSITIVE)} if above_zero else minimum


def _default(field: FieldInfo) -> Any:
    """A field's default as in a document; None if it should be omitted."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if value is None or (not isinstance(value, BaseModel) and value in ("", (), {})):
        return None
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    written: Any = TypeAdapter(kind).dump_python(value, mode="json", by_alias=True, exclude_none=True)
    return written


def _merge_keys(item: Schema) -> Schema:
    """Merge key of a list of named items, which also keeps names unique; the type for conditions.

    Points that may be of several variants are identified by both names, and their list is replaced as a whole.
    """
    fields, required = item.get("properties", {}), item.get("required", [])
    if "variant" in fields and "variant" not in required:
        return {}
    key = "type" if {"type", "status", "reason"} <= fields.keys() else "name"
    if key in fields and (key in required or "default" in fields[key]):
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {}


def _models_in(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in _classes_in(field.annotation):
            yield from _models_in(inner)


def _classes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _classes_in(argument)
