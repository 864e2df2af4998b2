"""Copies of a pipeline's weights in an object store or a folder, and the document that names them."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

import typer

from trimtab.preflight import local_path, write_edited
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.files import DEFAULT_LIMITS, folder_files, sha256
from trimtab_model_servers.weights.hf_hub import fetch_from_hub, snapshot_name
from trimtab_model_servers.weights.source import find_folder, put_file
from trimtab_pipelines.documents import load_pipeline, pipeline_file, pipeline_folder
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.yaml_edit import with_storage_uris

HUB = "hf://"
OutOption: TypeAlias = Annotated[
    Path | None, typer.Option("--out", "-o", help="File of the document that names the copies; default: print it")
]


@dataclass(frozen=True, slots=True)
class Target:
    """A prefix of a bucket, s3://BUCKET/PREFIX, or a folder."""

    uri: str

    @property
    def bucket(self) -> str:
        return urlsplit(self.uri).netloc if self.uri.startswith("s3://") else ""

    @property
    def prefix(self) -> str:
        return urlsplit(self.uri).path.strip("/")

    def location(self, name: str) -> str:
        """Storage URI of the copy of a file or folder."""
        if self.bucket:
            return f"s3://{self.bucket}/{self._key(name)}"
        return str(Path(self.uri).resolve() / name)

    def put(self, file: Path, name: str) -> bool:
        """Copy a file unless the copy has its content; return whether it was copied. Raises ModelError."""
        if self.bucket:
            return put_file(file, self.bucket, self._key(name))
        copy = Path(self.location(name))
        if copy.exists():
            if sha256(copy) == sha256(file):
                return False
            raise ModelError(f"{copy} has other content; give another folder, or delete it first")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, part := copy.with_name(f"{copy.name}.part"))
        part.replace(copy)
        return True

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}".lstrip("/")


def copy_weights(pipeline: Path, target: Target, out: Path | None, command: str, *, from_hub: bool) -> int:
    """Copy a pipeline's weights, those on the Hub only if `from_hub`; print or write the document that names them."""
    document, folder = load_pipeline(pipeline), pipeline_folder(pipeline)
    uris = {uri for stage in document.spec.stages for variant in stage.variants for uri in variant.storage_uris}
    locations: dict[str, tuple[str, str | None]] = {}
    copied: list[bool] = []
    try:
        for uri in sorted(filter(None, uris)):
            for path, name in _sources(uri, folder, from_hub=from_hub):
                for file in folder_files(path) if path.is_dir() else [path]:
                    file_name = f"{name}/{file.name}" if path.is_dir() else name
                    typer.echo(f"{file} → {target.location(file_name)}", err=True)
                    copied.append(target.put(file, file_name))
                locations[uri] = target.location(name), None if path.is_dir() else sha256(path)
    except (ModelError, OSError) as error:
        raise UserError(str(error)) from error
    text = with_storage_uris(pipeline_file(pipeline).read_text(), locations)
    if out is None:
        sys.stdout.write(text)
    else:
        write_edited(out, text)
    ResultLine(name=command, figures={"files": len(copied), "sent": sum(copied)}).print()
    return 0


def _sources(uri: str, folder: Path, *, from_hub: bool) -> Iterator[tuple[Path, str]]:
    """Yield the local file or folder of weights, and the name of its copy: its path, or its repository and commit."""
    path = local_path(uri, folder)
    if path is not None:
        yield path, str(path.relative_to(folder) if path.is_relative_to(folder) else path.name)
    elif from_hub and uri.startswith(HUB):
        address = uri.removeprefix(HUB)
        fetched = find_folder(uri, None) or fetch_from_hub(address, DEFAULT_LIMITS)
        repository = "/".join(address.split("/")[:2]).partition("@")[0]
        yield fetched, f"{repository}/{snapshot_name(fetched)}"
