"""`trimtab checkpoints`: checkpoints for a pipeline where there is no Hub."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
import yaml

from trimtab.options import PipelineArgument, console
from trimtab_pipelines.documents import DocumentError, load_pipeline, pipeline_file, write_atomically

RESOURCES = {"cpu": "500m", "memory": "1Gi"}


class Kind(Enum):
    """Kinds of checkpoints."""

    TINY = "tiny"


def command(
    kind: Annotated[Kind, typer.Argument(help="tiny: the same architectures and files, a few hundred kilobytes each")],
    pipeline: PipelineArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the copy and its checkpoints")],
) -> int:
    """Write a copy of a pipeline whose Hugging Face checkpoints are miniatures with random weights.

    The copy fits a small machine: every replica requests half a core. Its answers have no meaning.
    """
    from trimtab_model_servers.families.hf.miniatures import write_miniature  # noqa: PLC0415 - slow to import

    del kind  # the only one
    name = load_pipeline(pipeline).name
    document = yaml.safe_load(pipeline_file(pipeline).read_text())
    for stage in document["spec"]["stages"]:
        for variant in stage["variants"]:
            folder = f"{stage['name']}-{variant['name']}"
            if not write_miniature(variant.get("family", ""), variant.get("storageUri", ""), out / folder):
                raise DocumentError(f"variant {variant['name']}: no miniature of family {variant.get('family')!r}")
            variant |= {"storageUri": folder, "resources": {**RESOURCES}}
    document["spec"]["budget"] = {"cores": str(2 * len(document["spec"]["stages"]))}
    write_atomically(out / "pipeline.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    console.print(f"{name}: wrote {out / 'pipeline.yaml'}; serve it with trimtab up {out}")
    return 0
