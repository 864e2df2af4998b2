"""Renderer of the CustomResourceDefinitions: structural schemas, descriptions, columns and short names.

`python -m trimtab_pipelines.rendering.crd DIR` writes them; with `--check` it compares them and fails if one differs.
"""

import sys
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from trimtab_pipelines.kubernetes_names import GROUP, VERSION
from trimtab_pipelines.plan import PipelinePlan, PipelinePlanSpec
from trimtab_pipelines.profile import ModelProfile, ModelProfileSpec
from trimtab_pipelines.rendering import write_or_check
from trimtab_pipelines.rendering.crd_schema import structural, validations
from trimtab_pipelines.resource import Resource
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.status import InferencePipelineStatus, PipelinePlanStatus

NAME_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}},
}
"""Names become parts of labels and host names, so they are more restricted than Kubernetes requires."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; priority 1 is shown with `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Definition:
    """A kind of resource with its status and columns."""

    resource: type[Resource]
    spec: type[BaseModel]
    status: type[BaseModel] | None
    short_name: str
    columns: tuple[Column, ...]


def condition(kind: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


AGE = Column("Age", ".metadata.creationTimestamp", "date")
DEFINITIONS = (
    Definition(
        InferencePipeline,
        InferencePipelineSpec,
        InferencePipelineStatus,
        "ipl",
        (
            Column("URL", ".status.url"),
            Column("Ready", condition("Ready", "status")),
            Column("Reason", condition("Ready", "reason")),
            Column("RPS", ".status.rps"),
            Column("Accuracy", ".status.accuracy"),
            Column("P99", ".status.p99"),
            Column("Cores", ".status.cores"),
            Column("Devices", ".status.devices", priority=1),
            Column("Cost", ".status.costPerHour", priority=1),
            Column("Mode", ".spec.mode", priority=1),
            Column("Plan", ".status.planGeneration", "integer", 1),
            AGE,
        ),
    ),
    Definition(
        ModelProfile,
        ModelProfileSpec,
        None,
        "mprof",
        (
            Column("Pipeline", ".spec.pipeline"),
            Column("Stage", ".spec.stage"),
            Column("Accelerator", ".spec.hardware.accelerator"),
            Column("Processor", ".spec.hardware.processor", priority=1),
            AGE,
        ),
    ),
    Definition(
        PipelinePlan,
        PipelinePlanSpec,
        PipelinePlanStatus,
        "pplan",
        (
            Column("Pipeline", ".spec.pipeline"),
            Column("Generation", ".spec.generation", "integer"),
            Column("Applied", condition("Applied", "status")),
            Column("Reason", ".spec.reason"),
            Column("Change", ".spec.explanation.change", priority=1),
            AGE,
        ),
    ),
)


def custom_resource_definition(definition: Definition) -> dict[str, Any]:
    kind = definition.resource.__name__
    singular = kind.lower()
    properties: dict[str, Any] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": NAME_SCHEMA,
        "spec": structural(definition.spec),
    }
    subresources: dict[str, Any] = {}
    if definition.status is not None:
        properties["status"] = structural(definition.status, defaults=False)
        subresources = {"subresources": {"status": {}}}
    schema = {
        "type": "object",
        "description": definition.resource.__doc__,
        "required": ["spec"],
        "properties": properties,
        **validations(definition.resource),
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        **subresources,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{singular}s.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},  # deleting a definition deletes all its objects
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": f"{singular}s",
                "singular": singular,
                "shortNames": [definition.short_name],
                "categories": ["trimtab"],
            },
            "versions": [version],
        },
    }


def _column(column: Column) -> dict[str, Any]:
    written: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return written | ({"priority": column.priority} if column.priority else {})


def render() -> list[dict[str, Any]]:
    return [custom_resource_definition(definition) for definition in DEFINITIONS]


SUFFIX = ".yaml"
_HEADER = "# Rendered by `make generate` from the models of trimtab_pipelines; do not edit.\n"


def files() -> dict[str, str]:
    return {
        f"{body['spec']['names']['plural']}.yaml": _HEADER
        + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120)
        for body in render()
    }


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], files(), SUFFIX))
