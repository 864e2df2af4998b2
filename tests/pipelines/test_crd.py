"""Rendered CRDs and JSON schemas: equal to the committed files; columns of CRDs exist in the models."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.builders import a_pipeline
from trimtab_pipelines.rendering import crd, schema
from trimtab_pipelines.rendering.crd_schema import structural
from trimtab_pipelines.rendering.generated import differing, write_or_check
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.status import ConditionType, InferencePipelineStatus

CONDITION_PATH = re.compile(r'^\.status\.conditions\[\?\(@\.type=="(\w+)"\)\]\.(\w+)$')
CONDITIONS = {
    "InferencePipeline": set(typing.get_args(ConditionType)),
    "PipelinePlan": {"Applied"},
}
PREDEFINED = {".metadata.creationTimestamp"}


def columns() -> list[Any]:
    return [
        pytest.param(definition, column, id=f"{definition.short_name}-{column.name}")
        for definition in crd.DEFINITIONS
        for column in definition.columns
    ]


def field_of(model: type[BaseModel] | None, path: list[str]) -> dict[str, Any]:
    assert model is not None
    found = structural(model)
    for name in path:
        found = found["properties"][name]
    return found


def test_every_document_has_a_schema_in_camel_case():
    assert sorted(schema.render()) == [
        f"{kind}.schema.json" for kind in ("inferencepipeline", "modelprofile", "pipelineplan")
    ]
    assert '"storageUri"' in schema.render()["inferencepipeline.schema.json"]


def test_changed_and_surplus_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert write_or_check([str(tmp_path)], crd.files(), crd.SUFFIX) == 0
    (tmp_path / "pipelineplans.yaml").write_text("{}")
    (tmp_path / "forgotten.yaml").write_text("{}")

    assert differing(tmp_path, crd.files(), crd.SUFFIX) == ["pipelineplans.yaml", "forgotten.yaml"]
    assert write_or_check([str(tmp_path), "--check"], crd.files(), crd.SUFFIX) == 1
    assert "pipelineplans.yaml, forgotten.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(("definition", "column"), columns())
def test_each_column_shows_an_existing_field(definition: crd.Definition, column: crd.Column):
    condition = CONDITION_PATH.match(column.path)
    if condition is not None:
        kind, part = condition.groups()
        assert kind in CONDITIONS[definition.resource.__name__]
        assert part in {"status", "reason", "message"}
    elif column.path not in PREDEFINED:
        owner, *path = column.path.strip(".").split(".")
        field = field_of(definition.spec if owner == "spec" else definition.status, path)
        assert field["type"] == column.type


def test_lists_of_named_items_are_keyed_by_name():
    stages = structural(InferencePipelineSpec)["properties"]["stages"]
    stage = stages["items"]["properties"]
    lists = [stages, stage["variants"], stage["inputs"], stage["outputs"]]
    lists.append(stage["variants"]["items"]["properties"]["operatingPoints"])

    assert [found["x-kubernetes-list-map-keys"] for found in lists] == [["name"]] * 5


def test_status_schema_has_no_defaults():
    assert "default" not in str(structural(InferencePipelineStatus, defaults=False)["properties"]["stages"]["items"])


def test_every_spec_field_has_a_description_or_enum():
    """A field without description must be an enumeration, a boolean, a name, or a part that describes itself."""
    bare = [path for path, field in walk(structural(InferencePipelineSpec)) if not is_described(field)]

    assert bare == []


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name, field in schema.get("properties", {}).items():
        found.append((f"{path}.{name}", field))
        found += walk(field, f"{path}.{name}")
        found += walk(field.get("items", {}), f"{path}.{name}[]")
    return found


def is_described(field: dict[str, Any]) -> bool:
    bounded = {"enum", "pattern", "minimum", "maximum", "minItems", "items", "additionalProperties", "description"}
    return bool(bounded & field.keys()) or field["type"] in {"string", "boolean"}


@pytest.mark.parametrize("field", ["objective", "adaptation", "router", "rollout", "queue"])
def test_schema_default_equals_model_default(field: str):
    pipeline = a_pipeline()
    default = structural(InferencePipelineSpec)["properties"][field]["default"]
    document = pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"][field] = default

    assert type(pipeline).model_validate(document) == pipeline
