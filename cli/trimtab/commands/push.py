"""`trimtab push`: uploads the weights of a pipeline to an object store, and names them in a copy of its document."""

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from trimtab.options import PipelineArgument
from trimtab.preflight import local_path, write_edited
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.files import folder_files, sha256
from trimtab_model_servers.weights.source import put_file
from trimtab_pipelines.documents import load_pipeline, pipeline_file, pipeline_folder
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.yaml_edit import with_storage_uris


def command(
    pipeline: PipelineArgument,
    target: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Where the weights are stored")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File of the document that names the bucket; default: print it")
    ] = None,
) -> int:
    """Upload local weights with their digests to S3 or MinIO (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …).

    An object with the same content is not sent again; one with other content is never replaced. The pipeline's file is
    not changed: the document that names the bucket and the digests is printed, or written with --out.
    """
    parts = urlsplit(target)
    if parts.scheme != "s3" or not parts.netloc:
        raise UserError(f"{target}: write s3://BUCKET/PREFIX")
    document, folder = load_pipeline(pipeline), pipeline_folder(pipeline)
    uris = {uri for stage in document.spec.stages for variant in stage.variants for uri in variant.storage_uris}
    locations: dict[str, tuple[str, str | None]] = {}
    sent: list[bool] = []
    try:
        for uri in sorted(filter(None, uris)):
            path = local_path(uri, folder)
            if path is None:
                continue
            name = path.relative_to(folder) if path.is_relative_to(folder) else path.name
            key = f"{parts.path.strip('/')}/{name}".lstrip("/")
            for file in folder_files(path) if path.is_dir() else [path]:
                typer.echo(f"{file} → s3://{parts.netloc}/{key}", err=True)
                sent.append(put_file(file, parts.netloc, f"{key}/{file.name}" if path.is_dir() else key))
            locations[uri] = f"s3://{parts.netloc}/{key}", None if path.is_dir() else sha256(path)
    except ModelError as error:
        raise UserError(str(error)) from error
    text = with_storage_uris(pipeline_file(pipeline).read_text(), locations)
    if out is None:
        sys.stdout.write(text)
    else:
        write_edited(out, text)
    ResultLine(name="push", figures={"files": len(sent), "sent": sum(sent)}).print()
    return 0
