"""`trimtab mirror`: copies the weights of a pipeline from the Hugging Face Hub to an object store or a folder."""

from typing import Annotated

import typer

from trimtab.options import PipelineArgument
from trimtab.weight_copies import OutOption, Target, copy_weights
from trimtab_pipelines.errors import UserError


def command(
    pipeline: PipelineArgument,
    to: Annotated[str, typer.Option("--to", metavar="s3://BUCKET/PREFIX|FOLDER", help="Where the copies are stored")],
    out: OutOption = None,
) -> int:
    """Copy a pipeline's weights from the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN) to S3, MinIO or a folder.

    Local weights are copied too. Each copy is named by repository and commit. Files that were copied before are not
    copied again, so that an interrupted mirror resumes. The pipeline's file is not changed: the document that names
    the copies is printed, or written with --out.
    """
    target = Target(to)
    if "://" in to and not target.bucket:
        raise UserError(f"--to {to}: write s3://BUCKET/PREFIX or a folder")
    return copy_weights(pipeline, target, out, "mirror", from_hub=True)
