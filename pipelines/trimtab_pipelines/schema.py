"""Renders the documents' JSON schemas, for editors that check YAML while it is typed.

`python -m trimtab_pipelines.schema DIR` writes them; with `--check` it only compares and fails where one differs.
"""

import json
import sys
from pathlib import Path

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.resource import Resource
from trimtab_pipelines.spec import InferencePipeline

DOCUMENTS: tuple[type[Resource], ...] = (InferencePipeline, ModelProfile, PipelinePlan)


def render() -> dict[str, str]:
    """Map each file name to the text of its schema."""
    return {
        f"{document.__name__.lower()}.schema.json": json.dumps(
            document.model_json_schema(by_alias=True), indent=1, ensure_ascii=False
        )
        + "\n"
        for document in DOCUMENTS
    }


def differing(folder: Path) -> list[str]:
    """Name the schemas in a folder that are not what the models render now."""
    return [
        name for name, text in render().items() if not (folder / name).is_file() or (folder / name).read_text() != text
    ]


def main(arguments: list[str]) -> int:
    """Write or check the schemas in the folder named."""
    folder = Path(next(argument for argument in arguments if not argument.startswith("--")))
    if "--check" in arguments:
        stale = differing(folder)
        if stale:
            sys.stderr.write(f"{folder}: out of date: {', '.join(stale)}; run `make generate`\n")
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
