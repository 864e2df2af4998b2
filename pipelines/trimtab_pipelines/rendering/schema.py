"""Renderer of the resources' JSON schemas, with which editors validate YAML.

`python -m trimtab_pipelines.rendering.schema DIR` writes them; with `--check` it compares them and fails if one
differs.
"""

import json
import sys

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.rendering import write_or_check
from trimtab_pipelines.resource import Resource
from trimtab_pipelines.spec import InferencePipeline

SUFFIX = ".schema.json"
DOCUMENTS: tuple[type[Resource], ...] = (InferencePipeline, ModelProfile, PipelinePlan)


def render() -> dict[str, str]:
    return {
        f"{document.__name__.lower()}.schema.json": json.dumps(
            document.model_json_schema(by_alias=True), indent=1, ensure_ascii=False
        )
        + "\n"
        for document in DOCUMENTS
    }


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], render(), SUFFIX))
