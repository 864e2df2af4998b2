"""`trimtab push`: uploads the weights of a pipeline to an object store, and names them in a copy of its document."""

from typing import Annotated

import typer

from trimtab.options import PipelineArgument
from trimtab.weight_copies import OutOption, Target, copy_weights
from trimtab_pipelines.errors import UserError


def command(
    pipeline: PipelineArgument,
    target: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Where the weights are stored")],
    out: OutOption = None,
    *,
    from_hub: Annotated[bool, typer.Option("--from-hub", help="Also upload the weights named by hf://")] = False,
) -> int:
    """Upload local weights with their digests to S3 or MinIO (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …).

    An object with the same content is not sent again; one with other content is never replaced. The pipeline's file is
    not changed: the document that names the bucket and the digests is printed, or written with --out.
    """
    bucket = Target(target)
    if not bucket.bucket:
        raise UserError(f"{target}: write s3://BUCKET/PREFIX")
    return copy_weights(pipeline, bucket, out, "push", from_hub=from_hub)
